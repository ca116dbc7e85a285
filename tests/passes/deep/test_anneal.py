"""An annealed plan fits and computes the same; on small steps it is as good as that of exact search."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import PASSES, Machine, PlanResult, Recompute, Trace, apply, check, make_plan, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.deep.anneal import anneal
from passes.lp import solver
from passes.search.optimize import optimize
from tests.oracle.checkmate import checkmate
from tests.oracle.network import layers
from tests.passes.deep.test_phase_search import added_us, between
from tests.passes.search.test_greedy import STEP
from tests.support.interpreter import run
from tests.support.processes import printed
from tests.support.strategies import machines, traces

ALONE = Machine(0)


def test_a_step_at_every_budget() -> None:
    """As backward in phases has it, and Checkmate: at 4607 b is made for s, and a, dropped meanwhile, once more for t."""
    lines = []
    for budget in (6107, 5107, 4607, 4107):
        plan = anneal(STEP, replace(ALONE, budget=budget))
        lines += [f"{budget}: {added_us(STEP, plan):g} us", *map(str, plan)]
    assert_expected_inline(
        "\n".join(lines),
        """\
6107: 505 us
recompute b: before r
recompute c: before r
5107: 1010 us
recompute a: before r
recompute b: before r
recompute c: before r
recompute b: before s
4607: 1510 us
recompute a: before r
recompute b: before r
recompute c: before r
recompute a: before s
recompute b: before s
4107: 0 us""",
    )


@settings(max_examples=12)
@given(traces(max_forward=14), machines((0.0, 3.0)), st.floats(0.0, 1.0))
def test_a_plan_fits_and_computes_the_same(trace: Trace, machine: Machine, share: float) -> None:
    machine = replace(machine, budget=between(trace, share))
    if plan := anneal(trace, machine):
        applied = apply(trace, plan)
        check(applied)
        assert predict(applied, machine).peak <= machine.budget
        assert run(applied).computed == run(trace).computed
        assert not any(isinstance(each, Recompute) and trace.op[each.value].once for each in plan)


def test_it_finds_what_checkmate_finds() -> None:
    found = []
    trace = layers(2)
    for share in (0.0, 0.4):
        budget = between(trace, share)
        best = checkmate(trace, budget, 60.0, sweeps=2)
        plan = anneal(trace, replace(ALONE, budget=budget))
        found.append(f"{share}: {added_us(trace, plan):g} us, Checkmate {best.us:g}")
    assert_expected_inline(
        "\n".join(found),
        """\
0.0: 61 us, Checkmate 61
0.4: 17 us, Checkmate 17""",
    )


def test_it_ends_when_it_is_told_to() -> None:
    assert anneal(STEP, Machine(4607), until=-math.inf) == ()


def test_without_highs_nothing_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert anneal(STEP, Machine(4607))
    monkeypatch.setattr(solver, "highspy", None)
    assert anneal(STEP, Machine(4607)) == ()


def test_nothing_to_decide_is_nothing_to_anneal() -> None:
    assert anneal(Trace(()), Machine(-1)) == ()
    once = replace(STEP, ops=tuple(replace(op, once=op.name in ReuseGaps(STEP).holds) for op in STEP.ops))
    assert anneal(once, Machine(5107)) == ()


PLAN_EACH = """
import sys
from passes import Machine, parse, predict
from passes.deep.anneal import anneal
for text in sys.stdin.read().split("====="):
    trace = parse(text)
    for share in (0.6, 0.8):
        print(*anneal(trace, Machine(int(predict(trace, Machine(0)).peak * share))), sep="\\n")
"""


def test_the_same_step_has_the_same_plan() -> None:
    assert "recompute" in printed(PLAN_EACH, [STEP, layers(3)])


def test_it_is_asked_where_once_does_not_do() -> None:
    for budget, asked in ((6107, False), (4607, True)):
        names = set[str]()

        def log(name: str, best: PlanResult, names: set[str] = names) -> None:
            names.add(name)

        choice = make_plan(
            STEP,
            replace(ALONE, budget=budget),
            tuple(each for each in PASSES if each.find in (optimize, anneal)),
            log,
        )
        assert ("anneal" in names) == asked
        assert choice.is_single != asked
