"""A profiler of the caller does not change the forecast, and the report says what could not be measured."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import memgraph
from memgraph.optim.optimizer_profiler import OptimizerProfiler
from memgraph.profile import op_profiler
from memgraph.profile.memory_meter import Allocation, measure_peak
from memgraph.system import profiler_thread as apart_module
from memgraph.system.profiler_thread import is_profiled, is_unprofiled, run_unprofiled

MIB = 2**20


def profiled() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


class Sorted(nn.Module):
    """A model with a sort, which needs workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).flatten().sort().values.square().mean()


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Clear the caches, so that ops are priced in this test."""
    monkeypatch.setattr(op_profiler, "_known", {})
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path_factory.mktemp("costs")))


def forecast_of(x: Tensor, **wishes: Any) -> int:
    torch.manual_seed(0)
    return memgraph.plan(Sorted(), x, budget="1GB", **wishes).peak


def test_the_first_call_within_a_profiler_has_the_forecast_of_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1024, 64)
    with profiled():
        within = forecast_of(x)
    monkeypatch.setattr(op_profiler, "_known", {})
    assert within == forecast_of(x)


def test_the_profile_shows_nothing_of_the_pricing() -> None:
    module, x = Sorted(), torch.randn(1024, 64)
    with profiled() as profiler:
        memgraph.plan(module, x, budget="1GB")
    sorts = [event for event in profiler.key_averages() if event.key == "aten::sort"]
    assert sorts and not any(event.cpu_memory_usage for event in sorts)  # on fake tensors alone


def test_a_step_within_a_profiler_says_why_it_was_not_measured_and_the_next_one_is() -> None:
    compiled, x = memgraph.compile(Sorted(), "1GB"), torch.randn(1024, 64)
    with profiled():
        compiled(x).backward()
    assert compiled.plan.measured is None
    assert "measured not yet (a profiler was running" in str(compiled.plan)
    compiled.zero_grad()
    compiled(x).backward()
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak
    assert "profiler" not in str(compiled.plan).partition("\n\n")[0]


def test_the_profilers_of_other_threads_are_left_alone() -> None:
    compiled, x = memgraph.compile(Sorted(), "1GB"), torch.randn(1024, 64)
    started, done = threading.Event(), threading.Event()
    found: list[int] = []

    def work() -> None:
        with profiled() as profiler:
            started.set()
            done.wait(60)
            torch.ones(7)
        found.append(sum(event.key == "aten::ones" for event in profiler.key_averages()))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(60)
    compiled(x).backward()
    done.set()
    thread.join()
    assert found == [1]
    assert compiled.plan.measured is None


def test_an_update_is_priced_within_a_profiler_as_without() -> None:
    def workspace() -> object:
        parameter = nn.Parameter(torch.ones(300, 70))
        parameter.grad = torch.ones_like(parameter)
        return OptimizerProfiler(torch.optim.Adam([parameter], foreach=False)).workspace([[parameter]], {id(parameter)})

    with profiled():
        within = workspace()
    assert within == workspace()


def test_blocks_are_counted_apart_as_they_are_without_a_profiler() -> None:
    def work() -> Tensor:
        first, second = torch.empty(MIB, dtype=torch.uint8), torch.empty(3 * MIB, dtype=torch.uint8)
        del first
        return second

    with profiled():
        _, allocated = run_unprofiled(lambda: measure_peak(work))
        assert measure_peak(work)[1] is None
    assert allocated == Allocation(peak=4 * MIB, net=3 * MIB)


def test_apart_is_here_without_a_profiler_and_errors_come_back() -> None:
    assert not is_profiled()
    assert run_unprofiled(threading.get_ident) == threading.get_ident()
    with profiled():
        assert is_profiled()
        assert run_unprofiled(threading.get_ident) != threading.get_ident()
        assert run_unprofiled(is_unprofiled)
        with pytest.raises(ZeroDivisionError):
            run_unprofiled(lambda: 1 // 0)
    assert not is_unprofiled()
    assert vars(apart_module._here) == {}
