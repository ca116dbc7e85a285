"""No plan of the class beats the bound, the plans fit, and small steps are planned as exact search plans them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from passes import BudgetError, Choice, Machine, Trace, apply, linear, make_plan, parse, predict, program
from passes.gaps import Gaps
from passes.optimize import optimize
from passes.schedule import Fate
from tests.oracle.checkmate import checkmate
from tests.oracle.exhaustive import all_fates, best_of, cheapest, cheapest_of_all
from tests.oracle.network import layers
from tests.strategies import machines, traces

SMALL = 1e-6  # microseconds: what a solver's tolerance may add
SINGLE = (Fate.KEEP, Fate.RECOMPUTE, Fate.OFFLOAD, Fate.STALL)


@pytest.fixture(autouse=True)
def _small_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SMALLEST_TRIP", 1)


def between(trace: Trace, machine: Machine, share: float) -> Machine:
    """The machine with a budget between what no plan can lower and what is needed if nothing is done."""
    found = program.Program(Gaps(trace), machine)
    least, most = int(found.base.max()), found.captured.peak
    return replace(machine, budget=least + int((most - least) * share))


@settings(max_examples=150)
@given(traces(max_forward=14), st.floats(0.0, 1.0))
def test_no_keep_set_beats_the_bound(trace: Trace, share: float) -> None:
    assume(0 < len(Gaps(trace).maker) <= 9)
    machine = between(trace, Machine(0), share)
    best = cheapest(trace, machine.budget)
    assume(best is not None)
    found = optimize(trace, machine)
    assert best is not None and found.any_us <= best + SMALL and found.bound_us <= best + SMALL


@settings(max_examples=100)
@given(traces(max_forward=10), machines((0.5, 3.0, 100.0)), st.floats(0.0, 1.0))
def test_no_plan_that_moves_each_value_once_beats_the_bound(trace: Trace, machine: Machine, share: float) -> None:
    gaps = Gaps(trace)
    assume(0 < len(gaps.maker) <= 5)
    machine = between(trace, machine, share)
    single = {storage: [f for f in fates if f in SINGLE] for storage, fates in all_fates(gaps, machine).items()}
    best, any_best = best_of(gaps, single, machine), cheapest_of_all(trace, machine)
    found = optimize(trace, machine)
    assert best is None or found.bound_us <= best[0] + SMALL
    assert any_best is None or found.any_us <= any_best + SMALL


@settings(max_examples=100)
@given(traces(max_forward=25), machines(), st.floats(0.0, 1.0))
def test_a_plan_fits_and_is_the_same_again(trace: Trace, machine: Machine, share: float) -> None:
    machine = between(trace, machine, share)
    found = optimize(trace, machine)
    again = optimize(parse(str(trace)), machine)
    assert (found.plan, found.bound_us, found.any_us) == (again.plan, again.bound_us, again.any_us)
    assert found.any_us <= found.bound_us + SMALL or found.bound_us == 0
    if found.plan:
        forecast = predict(apply(trace, found.plan), machine)
        assert forecast.peak <= machine.budget
        choice = Choice(found.plan, predict(trace, machine), forecast, found.bound_us, found.any_us)
        assert forecast.us >= choice.lower_bound - SMALL


@settings(max_examples=40)
@given(traces(max_forward=20), machines(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_smaller_budget_takes_at_least_what_is_proven_of_a_larger(
    trace: Trace, machine: Machine, one: float, other: float
) -> None:
    small, large = (between(trace, machine, share) for share in sorted((one, other)))
    try:
        choices = make_plan(trace, small), make_plan(trace, large)
    except BudgetError:
        return
    assert choices[0].forecast.peak <= small.budget and choices[1].forecast.peak <= large.budget
    assert choices[0].forecast.us >= choices[1].captured.us + choices[1].any_us - SMALL


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
@pytest.mark.parametrize("count", [2, 4])
def test_a_network_is_planned_as_checkmate_plans_it(count: int, share: float) -> None:
    trace = layers(count)
    machine = between(trace, Machine(0), share)
    best = checkmate(trace, machine.budget, 60.0)
    choice = make_plan(trace, machine)
    added = choice.forecast.us - choice.captured.us
    assert best.proven
    assert choice.any_us <= best.us + SMALL
    assert best.us - SMALL <= added <= best.us + 0.005 * choice.captured.us + SMALL


def test_the_budget_may_be_what_no_plan_can_lower() -> None:
    trace = layers(4)
    found = program.Program(Gaps(trace), Machine(0))
    least = int(found.base.max())
    assert optimize(trace, Machine(least - 1)).plan == ()
    for budget in (least, least + 1):
        proposal = optimize(trace, Machine(budget))
        assert not proposal.plan or predict(apply(trace, proposal.plan), Machine(budget)).peak <= budget


def test_without_highs_the_other_passes_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = layers(4)
    machine = between(trace, Machine(0), 0.5)
    with_it = make_plan(trace, machine)
    monkeypatch.setattr(linear, "highspy", None)
    choice = make_plan(trace, machine)
    assert choice.forecast.peak <= machine.budget
    assert (choice.bound_us, choice.any_us) == (0.0, 0.0)
    assert choice.lower_bound == choice.captured.us
    assert with_it.forecast.us <= choice.forecast.us and with_it.gap <= choice.gap


@pytest.mark.parametrize(
    "text",
    [
        "forward:\na = f()  # makes a:8 | 1.0 us\nreturn output a",
        "forward:\nx = input()  # u8[8] | makes x:8\na = f(x)  # makes a:8\nb = f(a)  # makes b:8\nreturn output b",
        "backward:\nd = tangent()  # makes d:8\na = f(d)  # makes a:8\nreturn gradient a",
        "return",
    ],
)
@pytest.mark.parametrize("budget", [0, 8, 9, 10**9])
def test_degenerate_steps_are_planned_without_a_word(text: str, budget: int) -> None:
    proposal = optimize(parse(text), Machine(budget, out=1.0, back=1.0, staging=5))
    assert proposal.plan == () and not math.isnan(proposal.bound_us)


def test_costs_of_zero() -> None:
    trace = layers(3)
    free = replace(trace, ops=tuple(replace(op, us=0.0) for op in trace.ops))
    machine = between(free, Machine(0, out=10.0, back=10.0), 0.5)
    choice = make_plan(free, machine)
    assert choice.forecast.peak <= machine.budget and choice.bound_us == 0.0
