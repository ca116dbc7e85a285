"""A pass that is told when to end ends with the best so far; the clock is a counter, so that nothing here is timed."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from passes import BudgetError, Link, Machine, Plan, Proposal, Trace, apply, make_plan, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.deep.chain import rerun_chain
from passes.lp.problem import PlanProblem
from passes.pipeline import FITTING, PASSES, QUICK, Pass
from passes.schedule.candidate import Candidate, make_candidate
from passes.schedule.schedule import Placement
from passes.search import greedy
from passes.search.greedy import greedy_plan, greedy_thorough
from passes.search.optimize import local_search, optimize
from tests.oracle.network import layers

TRACE = layers(6)
LEAST = predict(apply(TRACE, greedy_plan(TRACE, Machine(0))), Machine(0)).peak
PEAK = predict(TRACE, Machine(0)).peak
TIGHT = Machine((LEAST + PEAK) // 2, link=Link(out=20.0, back=20.0))
LONG = 10**6
MOVED = parse("""
    forward:
    x = input()  # u8[10] | makes x:10
    d = tangent()  # u8[4] | makes d:4
    a = f(x)  # u8[1000] | makes a:1000 | 10.0 us
    b = f(a)  # u8[1000] | makes b:1000 | 10.0 us
    c = f(b)  # u8[1000] | makes c:1000 | 10.0 us
    o = f(c)  # u8[4] | makes o:4 | 10.0 us
    backward:
    p = g(d, c)  # u8[100] | makes p:100 | 10.0 us
    q = g(p, b)  # u8[100] | makes q:100 | 10.0 us
    r = g(q, a)  # u8[100] | makes r:100 | 10.0 us
    return output o, gradient r
""")


@pytest.fixture(autouse=True)
def _counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks at the clock finds it a second later than before."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))


def peak(plan: Plan | Proposal) -> int:
    return predict(apply(TRACE, plan.plan if isinstance(plan, Proposal) else plan), TIGHT).peak


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_every_pass_can_be_told_when_to_end(each: Pass) -> None:
    assert peak(each.find(TRACE, TIGHT, -1.0)) == PEAK  # nothing is decided


def ticks(most: int) -> range:
    return range(0, most, max(1, most // 12))


def test_the_longer_the_greedy_pass_goes_on_the_lower_it_comes() -> None:
    lowest = replace(TIGHT, budget=0)
    peaks = [peak(greedy_plan(TRACE, lowest, time.monotonic() + n)) for n in ticks(60)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] == PEAK > peaks[3] > peaks[-1] >= peak(greedy_plan(TRACE, lowest, LONG))


@pytest.mark.parametrize("find", [optimize, rerun_chain])
def test_what_has_no_time_left_proposes_what_fits_or_nothing(find: Callable[..., Plan | Proposal]) -> None:
    peaks = [peak(find(TRACE, TIGHT, time.monotonic() + n)) for n in ticks(40)]
    assert all(found <= TIGHT.budget or found == PEAK or find is rerun_chain for found in peaks)
    assert peak(find(TRACE, TIGHT, LONG)) <= TIGHT.budget


def test_a_plan_that_waits_is_made_better_until_the_time_is_over() -> None:
    slow = Machine(0, link=Link(out=1.0, back=1.0))
    first = make_candidate(ReuseGaps(MOVED), slow, dict.fromkeys("abc", Placement.OFFLOAD))
    program = PlanProblem(ReuseGaps(MOVED), replace(slow, budget=first.peak))
    times = [local_search(program, first, LONG, time.monotonic() + n).forecast.us for n in range(9)]
    assert times == sorted(times, reverse=True)
    assert times[0] == first.forecast.us > times[-1]
    assert local_search(program, first, 0, LONG) is first


def test_without_time_a_quick_pass_plans() -> None:
    names: list[str] = []
    choice = make_plan(TRACE, TIGHT, log=lambda name, _: names.append(name), seconds=0.0)
    assert choice.forecast.peak <= TIGHT.budget
    assert names == ["captured", "greedy_plan"]


def test_where_any_plan_will_do_the_first_that_fits_ends_it() -> None:
    names: list[str] = []
    choice = make_plan(TRACE, TIGHT, FITTING, lambda name, _: names.append(name))
    assert choice.forecast.peak <= TIGHT.budget
    assert names == ["captured", "rerun_chain"]


def test_what_fits_already_is_left_as_it_is_when_time_is_over() -> None:
    def by_hand(trace: Trace, machine: Machine, until: float) -> Plan:
        return greedy_plan(trace, machine)

    names: list[str] = []
    make_plan(TRACE, TIGHT, (Pass(by_hand), *QUICK), lambda name, _: names.append(name), seconds=2.0)
    make_plan(
        TRACE,
        replace(TIGHT, budget=PEAK - 1),
        (Pass(by_hand), *PASSES),
        lambda name, _: names.append(name),
        seconds=0.0,
    )
    assert names == ["captured", "by_hand", "captured", "greedy_plan"]


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.0, math.inf])
@pytest.mark.parametrize(("share", "part"), [(0.5, 0.75), (0.0, 0.5)])
def test_a_quick_pass_simulates_few_ops_of_a_long_step(
    share: float, part: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = layers(40)
    machine = Machine(int(share * predict(trace, Machine(0)).peak))
    simulated: list[int] = []
    real = make_candidate

    def counted(*given: Any) -> Candidate:
        state = real(*given)
        simulated.append(len(state.forecast.trace.ops))
        return state

    monkeypatch.setattr(greedy, "make_candidate", counted)
    monkeypatch.setattr(greedy, "FINE", 2 * len(trace.ops))
    with suppress(BudgetError):
        assert make_plan(trace, machine, QUICK, seconds=seconds).forecast.peak <= machine.budget
    few = sum(simulated)
    simulated.clear()
    greedy_plan(trace, machine, fine=math.inf)
    assert few < part * sum(simulated)


def test_a_budget_that_only_fine_steps_keep_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coarse steps end early, and come less low."""
    monkeypatch.setattr(greedy, "FINE", 1)
    machine, quick = Machine(0, link=TIGHT.link), tuple(each for each in QUICK if each.find is greedy_plan)
    lows = [predict(apply(TRACE, find(TRACE, machine)), machine).peak for find in (greedy_plan, greedy_thorough)]
    assert lows[1] < lows[0]
    with pytest.raises(BudgetError):
        make_plan(TRACE, replace(machine, budget=lows[1]), quick)
    assert PASSES[-1].find is greedy_thorough
    names: list[str] = []
    assert make_plan(
        TRACE, replace(machine, budget=lows[1]), (*quick, PASSES[-1]), lambda name, _: names.append(name)
    ).plan
    make_plan(TRACE, replace(machine, budget=lows[0]), (*quick, PASSES[-1]), lambda name, _: names.append(name))
    assert names == ["captured", "greedy_plan", "greedy_thorough", "captured", "greedy_plan"]


@pytest.mark.long
def test_a_budget_that_is_named_without_time_is_one_that_works_without() -> None:
    trace = layers(40)
    with pytest.raises(BudgetError) as caught:
        make_plan(trace, Machine(1), seconds=0.0)
    smallest = caught.value.smallest
    assert smallest < predict(trace, Machine(0)).peak
    assert make_plan(trace, Machine(smallest), seconds=0.0).forecast.peak <= smallest
