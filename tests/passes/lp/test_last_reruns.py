"""In long steps the program leaves out what has run again by then, if at all: its bound stays one, and is no lower."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from passes import Machine, Trace
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp import memory_rows, model, problem
from passes.search.optimize import optimize
from tests.passes.search.test_optimize import SMALL, assert_no_keep_set_beats_the_bound, best_that_moves_once, between
from tests.support.strategies import machines, traces


@pytest.fixture(autouse=True)
def _all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_rows, "LONG", 0)
    monkeypatch.setattr(problem, "SMALLEST_OFFLOAD", 1)


@given(traces(max_forward=14), st.floats(0.0, 1.0))
def test_no_keep_set_beats_the_bound(trace: Trace, share: float) -> None:
    assert_no_keep_set_beats_the_bound(trace, share)


@given(traces(max_forward=10), machines((0.5, 3.0, 100.0)), st.floats(0.0, 1.0))
def test_no_plan_that_moves_each_value_once_beats_the_bound(trace: Trace, machine: Machine, share: float) -> None:
    machine, best = best_that_moves_once(trace, machine, share)
    assume(best is not None)
    assert best is not None and optimize(trace, machine).bound_us <= best[0] + SMALL


@given(traces(max_forward=14), machines((0.5, 100.0)), st.floats(0.0, 1.0))
def test_the_program_says_no_less(trace: Trace, machine: Machine, share: float) -> None:
    """With the rows of all positions, and without those that are left out."""
    assume(len(ReuseGaps(trace).producer) > 0)
    machine = between(trace, machine, share)
    bound, full = _least(trace, machine, 0), _least(trace, machine, len(trace.ops))
    assert (bound is None) >= (full is None)
    assert bound is None or full is None or bound >= full - SMALL


def _least(trace: Trace, machine: Machine, long: int) -> float | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_rows, "LONG", long)
        written = model.PlanModel(problem.PlanProblem(ReuseGaps(trace), machine), machine.budget)
        for position in range(len(trace.ops)):
            written.memory.add(position)
        solved = written.lp.solve()
    return solved.us if solved else None
