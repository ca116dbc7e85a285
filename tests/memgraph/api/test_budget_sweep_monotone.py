"""A sweep shares its plans between budgets: less memory never takes less time, and never needs more."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memgraph import Sweep
from memgraph.api.budget_sweep import _BudgetPlans
from memgraph.planning.attempts.graph_planner import PricedStep
from memgraph.planning.progress import Progress
from passes import Machine, Trace, predict
from passes.lp import problem
from tests.support.strategies import machines, traces


@pytest.fixture(autouse=True)
def _small_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "SMALLEST_OFFLOAD", 1)


def sweep(trace: Trace, machine: Machine, seconds: float, budgets: list[int] | None) -> Sweep:
    return _BudgetPlans(lambda budget: iter([PricedStep(trace, machine)]), seconds).sweep(budgets, Progress())


def check(sweep: Sweep) -> None:
    fitting = [point for point in sweep.points if point.fits]
    assert [point.fits for point in sweep.points] == sorted((p.fits for p in sweep.points), reverse=True)
    for point in fitting:
        assert point.lower_bound <= point.us * (1 + 1e-9) and point.peak <= point.budget
    for large, small in pairwise(fitting):
        assert large.budget > small.budget
        assert large.us <= small.us
        assert large.peak >= small.peak


@settings(max_examples=15)
@given(
    traces(max_forward=16),
    machines((0.5, 3.0, 100.0)),
    st.lists(st.floats(0.0, 1.0), min_size=3, max_size=6),
    st.sampled_from([0.0, math.inf]),
)
def test_less_memory_takes_more_time_and_has_a_lower_peak(
    trace: Trace, machine: Machine, shares: list[float], seconds: float
) -> None:
    most = predict(trace, machine).peak
    check(sweep(trace, machine, seconds, [1 + int(most * share) for share in shares]))


@settings(max_examples=5)
@given(traces(max_forward=12), machines((3.0,)))
def test_a_spread_of_budgets_is_no_exception(trace: Trace, machine: Machine) -> None:
    found = sweep(trace, machine, 0.0, None)
    check(found)
    assert all(point.fits for point in found.points)
