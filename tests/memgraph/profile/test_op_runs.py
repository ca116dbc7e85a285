"""An op is run as often as its time needs: one whose first run is long runs once."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile import op_profiler
from memgraph.system import timer

RUNS: list[int] = []  # elements of each run
WAIT_S = {"each run": 0.0}
NEW_BYTES = {"each run": 0}


@torch.library.custom_op("memgraph_op_runs::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    RUNS.append(x.numel())
    time.sleep(WAIT_S["each run"])
    if new := NEW_BYTES["each run"]:
        with mmap.mmap(-1, new) as pages:
            for begin in range(0, new, mmap.PAGESIZE):
                pages[begin] = 1
    return x.clone()


@counted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


counted.register_autograd(lambda ctx, grad: grad)


class Counting(nn.Module):
    """A layer, and an op that counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return counted(self.linear(x)).sum()


@pytest.fixture(autouse=True)
def unknown_prices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(op_profiler, "_known", {})
    RUNS.clear()
    yield


@pytest.mark.long
@pytest.mark.parametrize(("long_us", "times"), [(0.0, 1), (float("inf"), 2)])
def test_an_op_whose_first_run_is_long_is_not_run_again_for_its_time(
    long_us: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_profiler, "LONG_US", long_us)
    monkeypatch.setattr(op_profiler, "KERNEL_SHARE", float("inf"))  # of a run of microseconds it is anything
    report = memgraph.plan(Counting(), torch.randn(32, 24), budget="1GB")
    assert [32 * 24] * times == RUNS  # one for its workspace, and one for its time, as the step needs no plan
    (op,) = [op for op in report.forecast.trace.ops if "counted" in op.fn]
    assert op.us > 0


@pytest.mark.long
def test_a_first_run_that_only_waits_is_no_measure_of_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_profiler, "LONG_US", 200_000.0)
    monkeypatch.setitem(WAIT_S, "each run", 0.25)
    memgraph.plan(Counting(), torch.randn(32, 24), budget="1GB")
    assert len(RUNS) == 2


@pytest.mark.long
def test_a_first_run_that_takes_new_pages_is_no_measure_of_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_profiler, "LONG_US", 10_000.0)
    monkeypatch.setitem(NEW_BYTES, "each run", 256 << 20)
    memgraph.plan(Counting(), torch.randn(32, 24), budget="1GB")
    assert len(RUNS) == 2


@pytest.mark.long
def test_a_long_run_is_not_repeated_when_its_time_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_profiler, "LONG_US", 0.0)
    monkeypatch.setattr(op_profiler, "KERNEL_SHARE", float("inf"))
    model, x = Counting(), torch.randn(32, 24)
    memgraph.plan(model, x, budget="1GB")  # fits: no time is needed
    memgraph.sweep(model, x)
    assert len(RUNS) == 1


@pytest.mark.parametrize(
    ("first_us", "times_us", "runs", "us"),
    [
        (0.0, [100.0, 101.0, 99.0], 2, 100.0),
        (98.0, [100.0, 99.0, 99.0], 1, 100.0),  # what was filled just before the first run may be in the cache still
        (120.0, [100.0, 101.0, 99.0], 2, 100.0),
        (120.0, [130.0, 121.0, 99.0], 2, 121.0),
    ],
)
def test_a_run_that_agrees_with_one_before_is_the_last(
    first_us: float, times_us: list[float], runs: int, us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(times_us)
    monkeypatch.setattr(timer, "timed_us", lambda run, device: (run(), next(left)))
    monkeypatch.setattr(timer, "waited_us", lambda: 0.0)
    assert timer.shortest_us(lambda: RUNS.append(1), torch.device("cpu"), first_us=first_us) == us
    assert len(RUNS) == runs
