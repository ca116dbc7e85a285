"""A failure on one rank in the middle of a step is reported on all at once, by name; a loaded state resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph import CollectiveError, ShardError, StateError
from memgraph.oss.checkpoint.full_state import TensorSender
from memgraph.oss.comm.exchange import P2PComm
from memgraph.oss.comm.watchdog import VERDICT
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.memgraph.oss.test_gradients import give, same, tensors, use_transport
from tests.support.ranks import on_ranks

SHAPES = ((400, 700), (5, 7), (3,), (41,))


class Whole(optim.Adam):
    """Not known to be pointwise, so that each rank has whole parameters, and steps once."""


def _starving(kind: type[optim.Optimizer], calls: int) -> Callable[..., Any]:
    """A step that fails the last time."""
    plain, left = kind.step, [calls]

    def step(self: optim.Optimizer) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no room")
        return plain(self)

    return step


def _failed(rank: int, path: Path, way: str, kind: type[optim.Optimizer], wire: torch.dtype | None) -> list[str]:
    use_transport(way)
    ours, plain = tensors(*SHAPES), tensors(*SHAPES)
    sharded, alone = memgraph.OSS(ours, kind, wire_dtype=wire, bucket_bytes=1 << 18), optim.Adam(plain)
    give(ours, 0, 3, rank)
    sharded.step()
    saved, module = sharded.state_dict(all_ranks=True), nn.ParameterList(ours)
    memgraph.save_sharded(path, module, sharded)
    values = [p.detach().clone() for p in ours]
    give(ours, 1, 3, rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(kind, "step", _starving(kind, 1 if kind is Whole else 2))
        messages = [refusal(MemoryError if rank == 1 else ShardError, sharded.step)]
    messages.append(refusal(ShardError, sharded.step))
    messages.append(refusal(ShardError, lambda: sharded.clip_grad_norm_(1.0)))
    messages.append(refusal(StateError, sharded.consolidate_state_dict))
    if kind is Whole:
        sharded.load_state_dict(saved)
        for parameter, value in zip(ours, values, strict=True):
            parameter.data.copy_(value)
    else:
        memgraph.load_sharded(path, module, sharded)
    for step in range(2):
        give(plain, step, 3)
        alone.step()
    sharded.step()
    if wire is None and way != "collectives":  # which add in an order of their own
        assert same(ours, plain)
    return messages


SLOW = pytest.mark.slow


@pytest.mark.long
@pytest.mark.parametrize(
    "way, kind, wire",
    [
        ("shared_memory", optim.Adam, None),
        pytest.param("shared_memory", Whole, None, marks=SLOW),
        pytest.param("p2p", optim.Adam, None, marks=SLOW),
        ("p2p", Whole, None),
        ("p2p", optim.Adam, torch.float16),
        pytest.param("collectives", optim.Adam, None, marks=SLOW),
    ],
)
def test_an_optimizer_that_fails_on_one_rank_is_an_error_on_all_and_trains_on_after_loading(
    way: str, kind: type[optim.Optimizer], wire: torch.dtype | None, tmp_path: Path
) -> None:
    first, own, last = on_ranks(3, _failed, tmp_path / "saved", way, kind, wire)
    assert first == last
    assert own[0] == "no room"
    assert first[0].startswith("the update has failed on another rank: MemoryError: no room on rank 1; some parameters")
    assert first[0].endswith("may differ: load an earlier state into model and optimizer, on all ranks")
    assert first[1] == first[2] == own[1]
    assert first[1].startswith("a step failed when some parameters were updated, and ranks may differ; load an earlier")
    assert first[3].startswith("rank 0 has no state to save: a step has failed when some parameters were updated")


def _left(rank: int, in_step: bool) -> list[Any]:
    """No memory for what comes of other ranks, so that one can't send either."""
    use_transport("p2p")
    ours = tensors(*SHAPES)
    sharded = memgraph.OSS(ours, optim.Adam, bucket_bytes=1 << 18)
    give(ours, 0, 3, rank)
    call = sharded.step if in_step else sharded.consolidate_state_dict
    if not in_step:
        sharded.step()
    if rank == 1:
        P2PComm.reduce = TensorSender.send = _no_room  # type: ignore[assignment, method-assign]
    with pytest.raises(RuntimeError) as caught:
        call()
    assert isinstance(caught.value, CollectiveError) == (rank != 1)
    sharded.watchdog.store.wait([VERDICT])  # this process is there, and so are its connections
    return [*getattr(caught.value, "ranks", ()), str(caught.value)]


def _no_room(*_: object) -> Any:
    return torch.empty(1 << 50)


@pytest.mark.parametrize("in_step", [True, pytest.param(False, marks=SLOW)])
def test_a_rank_that_can_not_do_what_others_wait_for_is_named_before_their_time_is_up(in_step: bool) -> None:
    first, own, last = on_ranks(3, _left, in_step, meet=False)
    assert "can't allocate memory" in own[0] and first[0] == last[0] == 1
    for text in (first[1], last[1]):
        assert "has failed: rank 1 could not go on: RuntimeError: " in text and "can't allocate memory" in text
        assert "timed out" not in text.lower()  # but a connection was closed, or reset as bytes were left unread


def _searched(rank: int) -> list[str]:
    """LBFGS, which rank 0 steps alone: its own failure, and what closures return."""
    ours = tensors((5, 7), (3,))
    sharded = memgraph.OSS(ours, optim.LBFGS, max_iter=3)
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        sharded.zero_grad()
        loss = torch.stack([p.square().sum() for p in ours]).sum()
        loss.backward()
        return loss

    def say(kind: type[Exception], given: Any) -> str:
        return refusal(kind, sharded.step, given)

    sharded.step(closure)
    messages = [say(TypeError if rank else ShardError, None if rank else closure)]
    messages.append(say(TypeError if rank == 0 else ShardError, lambda: None if rank == 0 else 1.0))
    messages.append(say(ValueError if rank else ShardError, lambda: "x" if rank else 1.0))
    before = len(calls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim.LBFGS, "_gather_flat_grad", _no_direction)
        messages.append(say(ArithmeticError if rank == 0 else ShardError, closure))
    assert len(calls) == before + 1
    sharded.step(closure)
    return [*messages, str(sum(float(p.sum()) for p in ours))]


def _no_direction(*_: object) -> None:
    raise ArithmeticError("no direction")


def test_an_lbfgs_step_that_fails_on_one_rank_is_an_error_on_all() -> None:
    leads, follows = on_ranks(2, _searched)
    wants = "LBFGS evaluates its closure several times; call step(closure)"
    assert follows[0] == wants and leads[0] == f"another rank can't step, so none does: TypeError: {wants} on rank 1"
    assert follows[1] == f"another rank can't step, so none does: TypeError: {leads[1]} on rank 0"
    assert leads[2] == f"another rank can't step, so none does: ValueError: {follows[2]} on rank 1"
    assert leads[3] == "no direction"
    assert follows[3] == "the step has failed on another rank: ArithmeticError: no direction on rank 0"
    assert leads[4] == follows[4]


def _returned(rank: int) -> list[str]:
    """Closures of an optimizer that does not look at what they return, and gradients that are wrong on one rank."""
    ours = tensors((5, 7), (3,))
    sharded = memgraph.OSS(ours, optim.SGD, lr=0.1)
    sharded.step()  # before backward
    give(ours, 0, 2, rank)
    assert sharded.step(lambda: "any" if rank else None) == ("any" if rank else None)

    def failing() -> float:
        if rank:
            raise KeyError("no batch")
        return 1.0

    return [refusal(KeyError if rank else ShardError, sharded.step, failing)]


def test_what_one_rank_can_not_step_with_is_named() -> None:
    first, own = on_ranks(2, _returned)
    assert own == ["'no batch'"]
    assert first == ["another rank can't step, so none does: KeyError: 'no batch' on rank 1"]
