"""Deep budgets are planned as Checkmate plans them, and no plan that recomputes in backward beats what is proven."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from passes import Machine, Plan, Recompute, Trace, apply, check, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.deep import phase_lp
from passes.deep.phase_lp import PhaseModel, PhaseProblem
from passes.deep.phase_search import cut_backward
from passes.lp import solver
from passes.lp.linear_program import INFINITY
from passes.lp.problem import PlanProblem
from passes.lp.solver import SearchLimits
from tests.oracle.checkmate import checkmate
from tests.oracle.exhaustive import cheapest_of_all
from tests.oracle.network import layers
from tests.passes.search.test_greedy import STEP
from tests.support.interpreter import run
from tests.support.processes import printed
from tests.support.strategies import machines, traces

SMALL = 1e-6  # microseconds: what a solver's tolerance may add
ALONE = Machine(0)


def added_us(trace: Trace, plan: Plan) -> float:
    return predict(apply(trace, plan), ALONE).us - predict(trace, ALONE).us


def test_a_step_at_every_budget() -> None:
    """At 4607 b is made for s, and a, dropped meanwhile, once more for t: no fate does that.  Checkmate says 1510 too."""
    lines = []
    for budget in (6107, 5107, 4607, 4107):
        found = cut_backward(STEP, replace(ALONE, budget=budget))
        lines += [f"{budget}: {added_us(STEP, found.plan):g} us, at least {found.any_us:g}", *map(str, found.plan)]
    assert_expected_inline(
        "\n".join(lines) + "\n",
        """\
6107: 505 us, at least 505
recompute b: before r
recompute c: before r
5107: 1010 us, at least 1010
recompute a: before r
recompute b: before r
recompute c: before r
recompute b: before s
4607: 1510 us, at least 1510
recompute a: before r
recompute b: before r
recompute c: before r
recompute a: before s
recompute b: before s
4107: 0 us, at least 0
""",
    )


@st.composite
def reruns(draw: st.DrawFn, trace: Trace) -> Plan:
    """Some forward ops run again in backward, some of them several times."""
    again = [op.name for op in trace.ops[: trace.boundary] if not op.is_input and not op.once]
    backward = [op.name for op in trace.ops[trace.boundary :]]
    assume(again and backward)
    pair = st.tuples(st.sampled_from(again), st.integers(0, len(backward) - 1))
    pairs = draw(st.lists(pair, max_size=10))
    return tuple(Recompute(value, backward[place]) for value, place in sorted(pairs, key=lambda pair: pair[1]))


@settings(max_examples=200)
@given(traces(max_forward=12), st.data(), st.sampled_from((0.0, 0.2)))
def test_no_plan_beats_the_bound_of_a_budget_that_it_just_fits(
    trace: Trace, data: st.DataObject, negligible: float
) -> None:
    """Wherever backward is cut, and however much counts as negligible."""
    plan = data.draw(reruns(trace))
    budget = predict(apply(trace, plan), ALONE).peak
    places = range(trace.boundary, len(trace.ops) - 1)
    cuts = data.draw(st.sets(st.sampled_from(places), max_size=6)) if places else set[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phase_lp, "NEGLIGIBLE", negligible)
        model = PhaseModel(
            PhaseProblem(PlanProblem(ReuseGaps(trace), ALONE), budget), budget, tuple(sorted(cuts)), INFINITY
        )
        assume(model.lp.costs)
        solved = model.solve()
        assert solved is not None and solved.us <= added_us(trace, plan) + SMALL
        _, bound = model.solve_integers(SearchLimits(-INFINITY, INFINITY, 0.0, INFINITY))
    assert bound <= added_us(trace, plan) + SMALL


@settings(max_examples=60)
@given(traces(max_forward=10), st.floats(0.0, 1.0))
def test_no_choice_of_placements_beats_the_bound(trace: Trace, share: float) -> None:
    assume(0 < len(ReuseGaps(trace).producer) <= 6)
    budget = between(trace, share)
    best = cheapest_of_all(trace, replace(ALONE, budget=budget))
    assert best is None or cut_backward(trace, replace(ALONE, budget=budget)).any_us <= best + SMALL


@settings(max_examples=30)
@given(traces(max_forward=8), st.floats(0.0, 1.0))
def test_no_plan_of_checkmate_beats_the_bound(trace: Trace, share: float) -> None:
    budget = between(trace, share)
    best = checkmate(trace, budget, 60.0, sweeps=2)
    assert cut_backward(trace, replace(ALONE, budget=budget)).any_us <= best.us + SMALL


@settings(max_examples=100)
@given(traces(max_forward=14), machines((0.0, 3.0)), st.floats(0.0, 1.0))
def test_a_plan_fits_and_computes_the_same(trace: Trace, machine: Machine, share: float) -> None:
    budget = between(trace, share)
    found = cut_backward(trace, replace(machine, budget=budget))
    assert found.any_us == 0.0 or not machine.link.out
    if found.plan:
        applied = apply(trace, found.plan)
        check(applied)
        assert predict(applied, machine).peak <= budget
        assert run(applied).computed == run(trace).computed
        assert added_us(trace, found.plan) >= found.any_us - SMALL


@settings(max_examples=20)
@given(traces(), st.floats(0.0, 1.0))
def test_what_may_run_once_runs_once(trace: Trace, share: float) -> None:
    whole = [op.makes and not op.is_input and op.fn != "aten.slice.default" for op in trace.ops]
    once = replace(trace, ops=tuple(replace(op, once=bool(alone)) for op, alone in zip(trace.ops, whole, strict=True)))
    found = cut_backward(once, replace(ALONE, budget=between(once, share)))
    assert not any(isinstance(said, Recompute) and once.op[said.value].once for said in found.plan)


def test_it_ends_when_it_is_told_to() -> None:
    assert cut_backward(STEP, Machine(4607), until=-math.inf).plan == ()


def test_without_highs_nothing_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut_backward(STEP, Machine(4607)).plan
    monkeypatch.setattr(solver, "highspy", None)
    assert cut_backward(STEP, Machine(4607)).plan == ()


PLAN_EACH = """
import sys
from passes import Machine, parse, predict
from passes.deep.phase_search import cut_backward
for text in sys.stdin.read().split("====="):
    trace = parse(text)
    for share in (0.5, 0.7, 0.9):
        found = cut_backward(trace, Machine(int(predict(trace, Machine(0)).peak * share)))
        print(found.any_us, *found.plan, sep="\\n")
"""


def test_the_same_step_has_the_same_plan() -> None:
    said = printed(PLAN_EACH, [STEP, layers(4)])
    assert "recompute" in said


def between(trace: Trace, share: float) -> int:
    """A budget between what no plan can lower and what is needed if nothing is done."""
    found = PlanProblem(ReuseGaps(trace), ALONE)
    least, most = int(found.floor.max()), found.captured.peak
    return least + int((most - least) * share)
