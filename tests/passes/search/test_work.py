"""What searches may take, and which are left out: a wider one with the work that a narrower one ran out of, and a pass
whose plans are proven slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from passes import Link, Machine, Plan, Proposal, Streaming, Trace, make_plan
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp import state_vars
from passes.lp.model import PlanModel
from passes.lp.problem import PlanProblem
from passes.lp.solver import INFINITY, SearchLimits, Solution
from passes.pipeline import Pass
from passes.search import optimize
from passes.search.greedy import greedy_plan_no_offload
from passes.search.optimize import SEARCHES, optimize_no_offload
from passes.search.work import FEW, NARROW, WORK_PER_OP
from tests.oracle.network import layers
from tests.passes.lp.test_state_vars import CHAIN
from tests.passes.search.test_optimize import between
from tests.passes.test_pipeline import FLOOR, STEP

LINKED = Machine(FLOOR, "cuda", "host", link=Link(1e3, 1e3))


def thresholds(monkeypatch: pytest.MonkeyPatch, ran_out: bool) -> list[float]:
    """Those of the searches of a pass in which no search finds anything, as shares of the step."""
    trace, found = layers(4), list[float]()
    machine = between(trace, Machine(0), 0.3)
    step_us = PlanProblem(ReuseGaps(trace), machine).captured.us

    def whole(
        model: PlanModel, relaxed: Solution, threshold: float, effort: SearchLimits, known: Solution | None = None
    ) -> tuple[list[Solution], float]:
        found.append(threshold / step_us)
        model.lp.out_of_work = ran_out
        return [], -INFINITY

    monkeypatch.setattr(optimize, "round_to_integers", whole)
    optimize.optimize(trace, machine)
    return found


def test_a_search_that_ran_out_of_its_work_is_followed_by_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    assert thresholds(monkeypatch, ran_out=False) == pytest.approx(SEARCHES)
    assert thresholds(monkeypatch, ran_out=True) == [SEARCHES[0], SEARCHES[-1]]


def test_a_narrow_search_of_few_ops_takes_what_one_of_more_does() -> None:
    search = optimize._Search(PlanProblem(ReuseGaps(STEP), LINKED), LINKED, INFINITY)
    assert search.work < WORK_PER_OP * FEW
    assert search.narrow == pytest.approx(NARROW * WORK_PER_OP * FEW)


@pytest.mark.parametrize(("home_us", "asked"), [(0.0, True), (1e6, False)])
def test_what_does_without_the_far_tier_is_not_asked_where_it_is_slower(home_us: float, asked: bool) -> None:
    was = list[str]()

    def first(trace: Trace, machine: Machine, until: float) -> Proposal:
        return Proposal(greedy_plan_no_offload(trace, machine), no_offload_us=home_us)

    def at_home(trace: Trace, machine: Machine, until: float) -> Plan:
        was.append("asked")
        return ()

    make_plan(STEP, replace(LINKED, budget=2 * FLOOR), (Pass(first), Pass(at_home)))
    assert not was  # it fits as it is
    make_plan(STEP, LINKED, (Pass(first), Pass(at_home)))
    assert bool(was) is asked


def test_what_is_proven_without_the_far_tier_is_proven_of_plans_without_it() -> None:
    trace = layers(4)
    alone = between(trace, Machine(0), 0.3)
    linked = replace(alone, tier="host", link=Link(1e3, 1e3))
    found = optimize_no_offload(trace, linked)
    assert found.bound_us == found.any_us == 0.0
    assert found.no_offload_us == optimize.optimize(trace, alone).any_us > 0.0


def test_where_no_rerun_fetches_anything_nothing_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_vars, "SMALLEST_STREAMED", 1)
    machine = Machine(
        4000, link=Link(out=20.0, back=20.0), streaming=Streaming(enabled=True, only_states=True, window=500)
    )
    search = optimize._Search(PlanProblem(ReuseGaps(CHAIN), machine), machine, INFINITY)
    monkeypatch.setattr(optimize._Search, "run", lambda search: pytest.fail("searched again"))
    search._again()
    assert search.program.states and not search._charge() and not search.events and search.charged
