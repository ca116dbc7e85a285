"""An error of one rank ends all of them within seconds, wherever it is raised, while the rank that failed lives on."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import optim

import memgraph
from memgraph import BudgetError, CaptureError
from memgraph.runtime.step_run import StepRun
from memgraph.stages import step_capture
from memgraph.stages.mini_batch import SharedGradients
from memgraph.stages.rank_stages import RankStages
from tests.support.ranks import on_ranks
from tests.support.staged_models import made

LIMIT = 20.0  # seconds, far below the timeout of the group


class Asking(Exception):
    """An error that can't be pickled as it is: it asks for more than it keeps."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def local() -> Exception:
    class Local(LookupError):
        """An error of a class that other processes do not have."""

    return Local("here alone")


class Fault(NamedTuple):
    """An error of one rank, the phase in which it is raised, and the class that all ranks then raise."""

    bad: int
    phase: str
    schedule: str = "1f1b"
    make: Callable[[], BaseException] = lambda: IndexError("no such row")
    kind: str = "IndexError"
    is_over: bool = True  # the group has ended


FAULTS = [
    *(Fault(bad, phase) for bad in (0, 1, 2) for phase in ("forward", "backward")),
    Fault(0, "backward", "gpipe"),
    Fault(1, "backward", "interleaved"),
    Fault(2, "forward", "zero_bubble"),
    *(Fault(bad, "evaluation") for bad in (0, 2)),
    *(Fault(bad, "update") for bad in (0, 1)),
    *(Fault(bad, "clipping") for bad in (0, 2)),
    Fault(1, "before"),
    Fault(1, "capture", make=lambda: CaptureError("no graph"), kind="CaptureError", is_over=False),
    Fault(2, "search", make=lambda: BudgetError("too much", 1, 2), kind="BudgetError", is_over=False),
    Fault(0, "capture", make=KeyboardInterrupt, kind="KeyboardInterrupt"),
    Fault(1, "search", make=KeyboardInterrupt, kind="KeyboardInterrupt"),
    Fault(0, "forward", make=KeyboardInterrupt, kind="KeyboardInterrupt"),
    Fault(1, "forward", make=lambda: SystemExit(3), kind="SystemExit"),
    Fault(0, "forward", make=lambda: RuntimeError("shapes"), kind="RuntimeError"),
    Fault(2, "forward", make=lambda: Asking("a", "b"), kind="Asking"),
    Fault(0, "forward", make=local, kind="LookupError"),
]


def _inject(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Let the second call of what runs in this phase raise, or the only one."""
    places: dict[str, tuple[Any, str, int]] = {
        "forward": (StepRun, "forward", 2), "backward": (StepRun, "run_part", 2), "evaluation": (StepRun, "forward", 2),
        "update": (optim.SGD, "step", 1), "clipping": (torch.nn.utils, "clip_grads_with_norm_", 1),
        "before": (SharedGradients, "begin", 1), "capture": (step_capture, "whole_step", 1),
        "search": (RankStages, "searched", 1),
    }  # fmt: skip
    where, name, last = places[fault.phase]
    plain, calls = getattr(where, name), list[str]()

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == last:
            raise fault.make()
        return plain(*args, **kwargs)

    patch.setattr(where, name, fail)


def _ended(rank: int, fault: Fault) -> tuple[str, str, list[str], float, str, str]:
    """Return what this rank raises, after how long, what it raises then, and the function that has raised the first."""
    group = dist.new_group(timeout=timedelta(seconds=120))
    assert isinstance(group, dist.ProcessGroup)
    with pytest.MonkeyPatch.context() as patch:
        model, batch = made("skips", 8)
        pipe = memgraph.pipeline(
            model, "1GB", 4, group, fault.schedule, optimizer=lambda given: optim.SGD(given, 0.1), time_limit=0
        )
        if fault.phase not in ("capture", "search"):
            pipe.step(**batch)
        if rank == fault.bad:
            _inject(patch, fault)
        begin = time.monotonic()
        with pytest.raises(BaseException) as caught, torch.set_grad_enabled(fault.phase != "evaluation"):
            for _ in range(2):  # a rank that waits for no other in one of them does in the next
                pipe.step(**batch)
                pipe.clip_grad_norm_(1.0)
                assert pipe.optimizer is not None
                pipe.optimizer.step()
        seconds = time.monotonic() - begin
    again = ""
    try:
        pipe.step(**batch)
    except memgraph.MemgraphError as error:
        again = str(error)
    raised, where = caught.value, traceback.extract_tb(caught.tb)[-1].name
    return type(raised).__name__, str(raised), list(getattr(raised, "__notes__", ())), seconds, again, where


def _all_ended(rank: int, faults: list[int]) -> list[Any]:
    found = []
    for number in faults:
        found.append(_ended(rank, FAULTS[number]))
        dist.barrier()  # in the group of all: the rank that has failed lives on until each one has ended
    return found


def _check(ranks: int, faults: list[int]) -> None:
    results = on_ranks(ranks, _all_ended, faults)
    for number, each in zip(faults, zip(*results, strict=True), strict=True):
        fault = FAULTS[number]
        for rank, (kind, text, notes, seconds, again, where) in enumerate(each):
            assert (where == "fail") is (rank == fault.bad)  # its traceback is whole
            assert kind == (fault.kind if rank != fault.bad else type(fault.make()).__name__), (fault, rank, kind, text)
            assert str(fault.make()) in text
            assert ("new process group" in again) is fault.is_over, (fault, rank, again)
            assert seconds < LIMIT, (fault, rank, seconds)
            if fault.is_over:
                assert any(f"on rank {fault.bad}" in note for note in notes), (fault, rank, notes)


@pytest.mark.long
def test_an_exception_on_one_rank_is_raised_on_all() -> None:
    _check(3, list(range(len(FAULTS))))


@pytest.mark.long
def test_an_exception_on_one_of_two_ranks_is_raised_on_both() -> None:
    _check(2, [number for number, fault in enumerate(FAULTS) if fault.bad < 2 and fault.make is FAULTS[0].make])


def _dying(rank: int, schedule: str, half: str, calls: int, way: str) -> Any:
    model, batch = made("gpt2", 8)
    pipe = memgraph.pipeline(model, "1GB", 4, schedule=schedule)
    pipe.step(**batch)
    if rank == 1:
        plain, left = getattr(StepRun, half), [None] * calls

        def die(self: StepRun, *args: Any, **kwargs: Any) -> Any:
            left.pop()
            if left:
                return plain(self, *args, **kwargs)
            return os._exit(1) if way == "exit" else os.kill(os.getpid(), signal.SIGKILL)

        setattr(StepRun, half, die)
    begin = time.monotonic()
    with pytest.raises(memgraph.CollectiveError) as caught:
        pipe.step(**batch)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule, half, calls, way",
    [
        ("1f1b", "run_part", 1, "exit"),
        ("interleaved", "forward", 5, "kill"),  # in the second stage of the rank
        ("interleaved", "run_part", 1, "exit"),
    ],
)
def test_a_rank_that_ends_is_named_on_the_others(schedule: str, half: str, calls: int, way: str) -> None:
    stages = "1, 4" if schedule == "interleaved" else "1"
    for rank, found in enumerate(on_ranks(3, _dying, schedule, half, calls, way, lost=[1])):
        if rank != 1:
            text, seconds = found
            assert "rank 1 is gone" in text and text.endswith(f"rank 1 has stage {stages}"), text
            assert seconds < LIMIT
