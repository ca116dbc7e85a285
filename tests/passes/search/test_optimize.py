"""No plan of the class beats the bound, the plans fit, and small steps are planned as exact search plans them."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from passes import (
    BudgetError,
    Cast,
    Link,
    Machine,
    Plan,
    PlanResult,
    Recompute,
    Reload,
    Trace,
    apply,
    make_plan,
    parse,
    predict,
)
from passes.analysis.reuse_gaps import ReuseGaps
from passes.ir import decisions
from passes.lp import problem, solver
from passes.schedule.schedule import Placement, schedule
from passes.search.optimize import optimize
from passes.search.work import WORK_PER_US, WorkLimits
from tests.oracle.checkmate import checkmate
from tests.oracle.exhaustive import all_fates, best_of, cheapest, cheapest_of_all
from tests.oracle.network import layers
from tests.support.strategies import machines, traces

SMALL = 1e-6  # microseconds: what a solver's tolerance may add
SINGLE = (
    Placement.KEEP,
    Placement.RECOMPUTE,
    Placement.OFFLOAD,
    Placement.OFFLOAD_BLOCKING,
    Placement.CAST_OFFLOAD,
    Placement.CAST_OFFLOAD_BLOCKING,
)


@pytest.fixture(autouse=True)
def _small_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "SMALLEST_OFFLOAD", 1)
    monkeypatch.setattr(decisions, "CAST_WORKSPACE", 0)


def between(trace: Trace, machine: Machine, share: float) -> Machine:
    """The machine with a budget between what no plan can lower and what is needed if nothing is done."""
    found = problem.PlanProblem(ReuseGaps(trace), machine)
    least, most = int(found.fixed.max()), found.captured.peak
    return replace(machine, budget=least + int((most - least) * share))


def assert_no_keep_set_beats_the_bound(trace: Trace, share: float) -> None:
    assume(0 < len(ReuseGaps(trace).producer) <= 9)
    machine = between(trace, Machine(0), share)
    best = cheapest(trace, machine.budget)
    assume(best is not None)
    found = optimize(trace, machine)
    assert best is not None and found.any_us <= best + SMALL and found.bound_us <= best + SMALL


def best_that_moves_once(trace: Trace, machine: Machine, share: float) -> tuple[Machine, tuple[float, Plan] | None]:
    """The machine with a budget between, and what the best plan adds that moves each of a few values once, if at all."""
    gaps = ReuseGaps(trace)
    assume(0 < len(gaps.producer) <= 5)
    machine = between(trace, machine, share)
    single = {storage: [f for f in fates if f in SINGLE] for storage, fates in all_fates(gaps, machine).items()}
    return machine, best_of(gaps, single, machine)


@given(traces(max_forward=14), st.floats(0.0, 1.0))
def test_no_keep_set_beats_the_bound(trace: Trace, share: float) -> None:
    assert_no_keep_set_beats_the_bound(trace, share)


@pytest.mark.long
@given(traces(max_forward=10), machines((0.5, 3.0, 100.0)), st.floats(0.0, 1.0))
def test_no_plan_that_moves_each_value_once_beats_the_bound(trace: Trace, machine: Machine, share: float) -> None:
    machine, best = best_that_moves_once(trace, machine, share)
    any_best, found = cheapest_of_all(trace, machine), optimize(trace, machine)
    assert best is None or found.bound_us <= best[0] + SMALL
    assert any_best is None or found.any_us <= any_best + SMALL


@given(traces(max_forward=12), machines((0.5, 3.0, 100.0)), st.data())
def test_no_plan_beats_the_bound_of_a_budget_that_it_just_fits(
    trace: Trace, machine: Machine, data: st.DataObject
) -> None:
    """Whenever its copies back begin."""
    gaps = ReuseGaps(trace)
    fates = {
        storage: data.draw(st.sampled_from([fate for fate in found if fate in SINGLE]))
        for storage, found in all_fates(gaps, machine).items()
    }
    plan = list(schedule(gaps, fates, machine))
    for i, decision in enumerate(plan):
        if isinstance(decision, Reload):
            back = data.draw(st.integers(trace.boundary, gaps.trace.index[decision.use]))
            plan[i] = replace(decision, back=trace.ops[back].name)
    if data.draw(st.booleans()):
        plan.sort(key=lambda decision: isinstance(decision, Recompute))
    captured, forecast = predict(trace, machine), predict(apply(trace, tuple(plan)), machine)
    found = optimize(trace, replace(machine, budget=forecast.peak))
    choice = PlanResult(tuple(plan), captured, forecast, found.bound_us, found.any_us)
    assert forecast.us >= choice.lower_bound - SMALL


@given(traces(max_forward=6), st.data())
def test_no_plan_lowers_the_floor(trace: Trace, data: st.DataObject) -> None:
    gaps = ReuseGaps(trace)
    choices = all_fates(gaps, Machine(0))
    fates = {storage: data.draw(st.sampled_from(list(choices[storage]))) for storage in choices}
    forecast = predict(apply(trace, schedule(gaps, fates, Machine(0))), Machine(0))
    floor = problem.PlanProblem(gaps, Machine(0)).floor
    assert forecast.peak >= floor.max(initial=0.0)
    assert optimize(trace, Machine(int(floor.max(initial=0.0)) - 1)).plan == ()


@pytest.mark.long
@given(traces(max_forward=8), machines((0.5, 3.0, 100.0), ("bf16",)), st.floats(0.0, 1.0))
def test_no_plan_that_casts_beats_the_bound(trace: Trace, machine: Machine, share: float) -> None:
    gaps = ReuseGaps(trace)
    assume(0 < len(gaps.producer) <= 3)
    machine = between(trace, machine, share)
    fates = all_fates(gaps, machine)
    single = {storage: [f for f in may if f in SINGLE] for storage, may in fates.items()}
    best, any_best = best_of(gaps, single, machine), best_of(gaps, fates, machine)
    found = optimize(trace, machine)
    assert best is None or found.bound_us <= best[0] + SMALL
    assert any_best is None or found.any_us <= any_best[0] + SMALL


# Both r and s have to go for p.  While r runs again, s comes back: neither way alone is as fast.
HIDDEN = parse("""
    forward:
    x = input()  # u8[10] | makes x:10
    d = tangent()  # u8[5] | makes d:5
    r = f(x)  # f32[250] | makes r:1000 | 100.0 us
    s = f(x)  # f32[250] | makes s:1000 | 100.0 us
    q = f(r, s)  # u8[1] | makes q:1 | 1.0 us
    t = f(q)  # u8[1] | makes t:1 | 5.0 us
    p = big(t)  # u8[1] | makes p:1 | 1000.0 us | workspace 2500
    backward:
    e = big(d)  # u8[1] | makes e:1 | 1.0 us
    g = f(e, r)  # u8[10] | makes g:10 | 1.0 us
    h = f(g, s)  # u8[10] | makes h:10 | 1.0 us
    return output p, gradient h
""")


@pytest.mark.long
@pytest.mark.parametrize("wire", ["", "bf16"])
@pytest.mark.parametrize("rate", [5.0, 10.0, 20.0, 50.0])
def test_links_carry_on_while_ops_run_again(rate: float, wire: str) -> None:
    machine = Machine(2700, link=Link(out=1000.0, back=rate), cast=Cast(dtype=wire, out=50.0, back=50.0))
    best = cheapest_of_all(HIDDEN, machine)
    found = optimize(HIDDEN, machine)
    added = predict(apply(HIDDEN, found.plan), machine).us - predict(HIDDEN, machine).us
    assert best is not None and max(found.any_us, found.bound_us) <= best + SMALL
    assert best - SMALL <= added <= best + (SMALL if not wire else 0.01 * predict(HIDDEN, machine).us)


# s may not run again, and only a's re-run reads it: it has to go for p, and its trip is shorter than a's.
INDIRECT = parse("""
    forward:
    x = input()  # u8[10] | makes x:10
    d = tangent()  # u8[5] | makes d:5
    s = once(x)  # f32[250] | makes s:1000 | once
    a = f(s)  # f32[500] | makes a:2000 | 1.0 us
    t = f(a)  # u8[1] | makes t:1 | 1.0 us
    u = f(t)  # u8[1] | makes u:1 | 5.0 us
    p = big(u)  # u8[1] | makes p:1 | 1.0 us | workspace 4000
    backward:
    g = f(d, a)  # u8[10] | makes g:10 | 1.0 us
    return output p, gradient g
""")


@pytest.mark.parametrize("wire", ["", "bf16"])
def test_what_only_re_runs_read_may_go_away_too(wire: str) -> None:
    machine = Machine(4100, link=Link(out=1e6, back=10.0), cast=Cast(dtype=wire, out=50.0, back=50.0))
    best = cheapest_of_all(INDIRECT, machine)
    found = optimize(INDIRECT, machine)
    added = predict(apply(INDIRECT, found.plan), machine).us - predict(INDIRECT, machine).us
    assert best is not None and max(found.any_us, found.bound_us) <= best + SMALL
    assert added == pytest.approx(best, rel=1e-3)


# s comes back for w's re-run and waits for i, with room for itself once at h: that it came and is there counts once.
TWICE = parse("""
    forward:
    x = input()  # u8[10] | makes x:10
    d = tangent()  # u8[5] | makes d:5
    s = once(x)  # u8[1000] | makes s:1000 | once | 10.0 us
    w = f(s)  # u8[500] | makes w:500 | 1.0 us
    t = f(w)  # u8[1] | makes t:1 | 100.0 us
    p = big(t)  # u8[1] | makes p:1 | 1000.0 us | workspace 3000
    backward:
    e = f(d)  # u8[1] | makes e:1 | 1000.0 us
    g = f(e, w)  # u8[10] | makes g:10 | 1000.0 us
    h = mid(g)  # u8[10] | makes h:10 | 100.0 us | workspace 1900
    i = f(h, s)  # u8[10] | makes i:10 | 1000.0 us
    return output p, gradient i
""")


@pytest.mark.parametrize("rate", [0.2, 0.4, 0.6])
def test_what_came_back_for_a_re_run_is_there_once(rate: float) -> None:
    machine = Machine(3050, link=Link(out=1000.0, back=rate))
    best = cheapest_of_all(TWICE, machine)
    found = optimize(TWICE, machine)
    assert best is not None and 0.0 < found.any_us <= found.bound_us + SMALL <= best + 2 * SMALL


def test_a_search_without_time_says_nothing() -> None:
    found = optimize(TWICE, Machine(3050, link=Link(out=1000.0, back=0.4)), until=time.monotonic())
    assert (found.plan, found.bound_us, found.any_us) == ((), 0.0, 0.0)


def test_a_search_with_time_enough_is_that_without_a_clock() -> None:
    machine = Machine(3050, link=Link(out=1000.0, back=0.4))
    found, timed = optimize(TWICE, machine), optimize(TWICE, machine, until=time.monotonic() + 1000.0)
    assert found.plan and (found.plan, found.bound_us, found.any_us) == (timed.plan, timed.bound_us, timed.any_us)


@pytest.mark.long
@given(traces(max_forward=25), machines(wires=("", "bf16")), st.floats(0.0, 1.0))
def test_a_plan_fits_and_is_the_same_again(trace: Trace, machine: Machine, share: float) -> None:
    machine = between(trace, machine, share)
    found = optimize(trace, machine)
    again = optimize(parse(str(trace)), machine)
    assert (found.plan, found.bound_us, found.any_us) == (again.plan, again.bound_us, again.any_us)
    assert found.any_us <= found.bound_us + SMALL or found.bound_us == 0
    if found.plan:
        forecast = predict(apply(trace, found.plan), machine)
        assert forecast.peak <= machine.budget
        choice = PlanResult(found.plan, predict(trace, machine), forecast, found.bound_us, found.any_us)
        assert forecast.us >= choice.lower_bound - SMALL


@pytest.mark.long
@given(traces(max_forward=20), machines(wires=("", "bf16")), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
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


@pytest.mark.long
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
    found = problem.PlanProblem(ReuseGaps(trace), Machine(0))
    least = int(found.fixed.max())
    assert optimize(trace, Machine(least - 1)).plan == ()
    for budget in (least, least + 1):
        proposal = optimize(trace, Machine(budget))
        assert not proposal.plan or predict(apply(trace, proposal.plan), Machine(budget)).peak <= budget


def test_a_step_of_few_ops_is_searched_for_as_far_as_its_time_pays() -> None:
    def total(size: int, step_us: float) -> float:
        return WorkLimits.for_step(size, step_us).total

    short, long, endless = (total(100, us) for us in (20e3, 60e3, 1e9))
    assert short == total(100, 0.0) < long < endless == total(1_000, 1e9)
    assert long == 3 * WORK_PER_US * 20e3


def test_many_ops_that_take_hardly_any_time_are_searched_for_like_few() -> None:
    def total(size: int, step_us: float) -> float:
        return WorkLimits.for_step(size, step_us).total

    assert total(20_000, 100e3) == total(1_000, 100e3)
    assert total(20_000, 1e6) == WORK_PER_US * 1e6 < total(20_000, 1e9) == 20 * total(1_000, 0.0)


def test_without_highs_the_other_passes_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = layers(4)
    machine = between(trace, Machine(0), 0.5)
    with_it = make_plan(trace, machine)
    monkeypatch.setattr(solver, "highspy", None)
    choice = make_plan(trace, machine)
    assert choice.forecast.peak <= machine.budget
    assert choice.greedy and not with_it.greedy
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
    proposal = optimize(parse(text), Machine(budget, link=Link(out=1.0, back=1.0, staging=5)))
    assert proposal.plan == () and not math.isnan(proposal.bound_us)


def test_costs_of_zero() -> None:
    trace = layers(3)
    free = replace(trace, ops=tuple(replace(op, us=0.0) for op in trace.ops))
    machine = between(free, Machine(0, link=Link(out=10.0, back=10.0)), 0.5)
    choice = make_plan(free, machine)
    assert choice.forecast.peak <= machine.budget and choice.bound_us == 0.0
