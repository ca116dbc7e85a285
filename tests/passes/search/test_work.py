"""Limits of searches: a wider search is skipped after a narrower one ran out of work, and a pass is skipped if its plans
are proven slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from passes import Link, Machine, Plan, Proposal, Streaming, Trace, make_plan
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp import state_vars
from passes.lp.linear_program import INFINITY
from passes.lp.model import PlanModel
from passes.lp.problem import PlanProblem
from passes.lp.solver import SearchLimits, Solution
from passes.pipeline import Pass
from passes.search import optimize, rounding_search
from passes.search.greedy import greedy_plan_no_offload
from passes.search.optimize import THRESHOLDS, optimize_no_offload, plan_with_state
from passes.search.rounding_search import RoundingSearch
from passes.search.work import FEW, NARROW, REPAID, WORK_PER_OP, WorkLimits
from tests.oracle.network import layers
from tests.passes.lp.test_state_vars import CHAIN
from tests.passes.search.test_optimize import between
from tests.passes.test_pipeline import FLOOR, STEP

LINKED = Machine(FLOOR, "cuda", "host", link=Link(1e3, 1e3))


def thresholds(monkeypatch: pytest.MonkeyPatch, ran_out: bool) -> list[float]:
    """Return the thresholds of a pass whose searches find nothing, as shares of the step."""
    trace, searched = layers(4), list[float]()
    machine = between(trace, Machine(0), 0.3)
    step_us = PlanProblem(ReuseGaps(trace), machine).captured.us

    def find_nothing(
        model: PlanModel, relaxed: Solution, threshold: float, limits: SearchLimits, start: Solution | None = None
    ) -> tuple[list[Solution], float]:
        searched.append(threshold / step_us)
        model.lp.out_of_work = ran_out
        return [], -INFINITY

    monkeypatch.setattr(rounding_search, "round_to_integers", find_nothing)
    optimize.optimize(trace, machine)
    return searched


def test_a_search_that_ran_out_of_its_work_is_followed_by_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    assert thresholds(monkeypatch, ran_out=False) == pytest.approx(THRESHOLDS)
    assert thresholds(monkeypatch, ran_out=True) == [THRESHOLDS[0], THRESHOLDS[-1]]


@pytest.mark.parametrize("limited", [True, False])
def test_a_relaxed_program_that_runs_out_of_its_work_is_not_rounded(
    limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[bool] = []

    def find_nothing(*given: Any) -> tuple[list[Solution], float]:
        searched.append(limited)
        return [], -INFINITY

    monkeypatch.setattr(rounding_search, "round_to_integers", find_nothing)
    if limited:
        monkeypatch.setattr(optimize, "RELAXING", 0.0)
    trace = layers(4)
    optimize.optimize(trace, between(trace, Machine(0), 0.3))
    assert bool(searched) is not limited


def test_a_narrow_search_of_few_ops_takes_what_one_of_more_does() -> None:
    problem = PlanProblem(ReuseGaps(STEP), LINKED)
    limits = WorkLimits.for_step(problem.size, problem.captured.us)
    assert limits.total < WORK_PER_OP * FEW
    assert limits.narrow == pytest.approx(NARROW * WORK_PER_OP * FEW)


@pytest.mark.parametrize(("home_us", "asked"), [(0.0, True), (1e6, False)])
def test_a_pass_without_offload_does_not_run_where_it_is_slower(home_us: float, asked: bool) -> None:
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


def test_a_bound_without_offload_holds_for_plans_without_it() -> None:
    trace = layers(4)
    alone = between(trace, Machine(0), 0.3)
    linked = replace(alone, tier="host", link=Link(1e3, 1e3))
    found = optimize_no_offload(trace, linked)
    assert found.bound_us == found.any_us == 0.0
    assert found.no_offload_us == optimize.optimize(trace, alone).any_us > 0.0


def test_where_no_recomputation_reloads_state_there_is_no_second_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_vars, "SMALLEST_STREAMED", 1)
    machine = Machine(
        4000, link=Link(out=20.0, back=20.0), streaming=Streaming(enabled=True, only_states=True, window=500)
    )
    work = WorkLimits(1e9, 1e9)
    search = RoundingSearch(PlanProblem(ReuseGaps(CHAIN), machine), INFINITY, work)
    monkeypatch.setattr(RoundingSearch, "start", lambda *args: pytest.fail("searched again"))
    assert plan_with_state(search, work, 0.0) is None
    assert search.problem.states and not search.charge_reloads()
    assert not search.reload_rows and search.charges_reloads


def test_where_someone_waits_a_search_has_to_be_repaid() -> None:
    alone, waiting = WorkLimits.for_step(500, 10_000.0), WorkLimits.for_step(500, 10_000.0, until=60.0)
    assert alone.left(0.0, gain_us=1.0) == waiting.left(0.0, INFINITY) == 500 * WORK_PER_OP
    assert waiting.left(10_000_000, gain_us=400.0) == 400 * REPAID - 10_000_000
    assert waiting.smaller.left(0.0, gain_us=1.0) == REPAID
