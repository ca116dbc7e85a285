"""After `time_limit` a call ends with what it has: in pricing and in the quick passes."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from memgraph.options import compile_options
from memgraph.options.compile_options import FIRST_CALL_S
from memgraph.planning import search
from memgraph.profile import op_profiler
from memgraph.system.timer import shortest_us
from passes import BudgetError, Machine, PlanResult, Trace, make_plan
from passes.pipeline import Log


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())), nn.Softmax(-1))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops that are timed by more than one run; none was priced before."""
    found: list[Any] = []

    def noted(*given: Any, **options: Any) -> float:
        found.append(given)
        return shortest_us(*given, **options)

    monkeypatch.setattr(op_profiler, "shortest_us", noted)
    monkeypatch.setattr(op_profiler, "_known", {})
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    return found


@pytest.mark.long
def test_a_step_that_fits_as_it_is_is_priced_in_bytes_alone(timed: list[Any]) -> None:
    x = torch.ones(64, 16)
    quick = memgraph.plan(net(), x, budget="1GB")
    assert timed == [] and quick.plan == ()
    assert quick.forecast.us > 0
    tight = memgraph.plan(net(), x, budget=quick.peak - 1, offload=None)
    assert timed and tight.plan and tight.peak < quick.peak
    fits = memgraph.plan(net(), x, budget="1GB")
    assert fits.peak == quick.peak


def test_nothing_is_timed_for_a_step_that_no_plan_can_fit(timed: list[Any]) -> None:
    x = torch.ones(64, 16)
    with pytest.raises(memgraph.BudgetError, match="No plan can use less") as caught:
        memgraph.plan(net(), x, budget=9_000)
    assert timed == []
    fits = memgraph.plan(net(), x, budget=caught.value.smallest)
    assert timed and fits.peak <= caught.value.smallest


def test_without_time_each_op_runs_for_its_bytes_and_one_time(
    timed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(64, 16)
    budget = memgraph.plan(net(), x, budget="1GB").peak - 4096
    late = memgraph.plan(net(), x, budget=budget, offload=None, time_limit=0)
    assert timed == [] and late.plan and late.peak <= budget
    patient = memgraph.plan(net(), x, budget=budget, offload=None)
    assert timed
    bytes_of = [{op.name: op.workspace for op in found.choice.captured.trace.ops} for found in (late, patient)]
    assert bytes_of[0] == bytes_of[1]
    compiled = memgraph.compile(net(), budget, offload=None, time_limit=0)
    compiled(x).sum().backward()
    assert compiled.plan.measured is not None and compiled.plan.measured <= compiled.plan.peak <= budget


@pytest.mark.long
@pytest.mark.parametrize(("limit", "most"), [(1000, 1000.0), (None, FIRST_CALL_S)])
def test_what_later_calls_need_is_planned_within_the_same_limit(
    limit: float | None, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []

    def spent(trace: Trace, machine: Machine, log: Log, seconds: float, interruptible: bool) -> PlanResult:
        left.append(seconds)
        time.sleep(0.3)
        return make_plan(trace, machine, log=log, seconds=seconds)

    monkeypatch.setattr(search, "make_plan", spent)
    with pytest.raises(memgraph.BudgetError, match="adds to gradients"):
        memgraph.plan(net(), torch.ones(64, 16), budget=1000, offload=None, time_limit=limit)
    assert left[0] < most and len(left) >= 2
    assert all(before >= after + 0.3 for before, after in pairwise(left))


@pytest.mark.parametrize("limit", [None, 0.0])
def test_a_budget_is_not_refused_for_want_of_time_unless_a_limit_was_given(
    limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def late(trace: Trace, machine: Machine, log: Log, seconds: float, interruptible: bool) -> PlanResult:
        given.append(seconds)
        if seconds < 1.0:
            raise BudgetError("none fits", machine.budget, machine.budget + 1, timed_out=True)
        return make_plan(trace, machine, log=log, seconds=seconds)

    x = torch.ones(64, 16)
    budget = memgraph.plan(net(), x, budget="1GB").peak - 4096
    monkeypatch.setattr(search, "make_plan", late)
    monkeypatch.setattr(compile_options, "FIRST_CALL_S", 0.0)
    monkeypatch.setattr(compile_options, "LEAST_S", 0.0)
    if limit is None:
        assert memgraph.plan(net(), x, budget=budget, offload=None, time_limit=limit).peak <= budget
        assert given[0] == 0.0 and given[1] > 100.0
    else:
        with pytest.raises(memgraph.BudgetError):
            memgraph.plan(net(), x, budget=budget, offload=None, time_limit=limit)
        assert set(given) == {0.0}
