"""The plan of the step without slices counts where it is the faster one, and is searched for only where it may be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import BudgetError, Machine, PlanResult, Trace, make_plan, parse, predict
from passes.lp import problem
from passes.pipeline import BESIDE
from passes.slices.whole_step import among, has_room, is_faster, needs_none, whole_plan
from tests.support.strategies import machines, traces

# Without a plan it needs 2,100 bytes and takes 60 us; to run a again makes it 2,050 bytes and 70 us.
WHOLE = parse("""
    forward:
    x = input()  # u8[50] | makes x:50
    d = tangent()  # u8[50] | makes d:50
    a = mm(x)  # u8[1000] | makes a:1000 | 10.0 us
    b = gelu(a)  # u8[1000] | makes b:1000 | 20.0 us
    c = sum(b)  # u8[500] | makes c:500 | 10.0 us
    o = sum(c)  # u8[50] | makes o:50 | 5.0 us
    backward:
    p = sum_backward(d, b)  # u8[900] | makes p:900 | 5.0 us
    q = gelu_backward(p, a)  # u8[50] | makes q:50 | 10.0 us
    return output o, gradient q
""")
TIGHT = Machine(2_100)


def sliced(us: float) -> PlanResult:
    """Return the result of a step in slices that fits, and takes so long."""
    trace = parse(f"forward:\na = f()  # u8[8] | makes a:8 | {us} us\nreturn output a")
    return make_plan(trace, TIGHT)


def beside(us: float) -> str:
    """Return which plan is taken beside slices of so many microseconds, what is proven, and the passes that ran."""
    tried: list[str] = []

    def search(trace: Trace, machine: Machine, below: float) -> PlanResult:
        return make_plan(trace, machine, BESIDE, lambda name, best: tried.append(name), below=below)

    known = sliced(us)
    whole = whole_plan(known, WHOLE, TIGHT, search)
    faster = is_faster(whole, known, TIGHT.budget)
    taken = among(whole, known) if faster else among(known, whole)
    name = "whole" if faster else "in slices"
    return f"{name} {taken.forecast.us:g} us, at least {taken.lower_bound:g}, gap {taken.gap:.1%}: {', '.join(tried) or 'no search'}\n"


def test_the_faster_plan_counts_and_is_searched_for_where_it_may_be() -> None:
    assert predict(WHOLE, TIGHT).peak > TIGHT.budget and predict(WHOLE, TIGHT).us == 60
    assert_expected_inline(
        "".join(map(beside, (60.5, 65.0, 69.0, 70.0, 72.0, 90.0))),
        """\
in slices 60.5 us, at least 60, gap 0.8%: no search
in slices 65 us, at least 65, gap 0.0%: captured, prove
in slices 69 us, at least 69, gap 0.0%: captured, prove
in slices 70 us, at least 69.5, gap 0.7%: captured, prove
whole 70 us, at least 69.5, gap 0.7%: captured, prove, optimize
whole 70 us, at least 69.5, gap 0.7%: captured, prove, optimize
""",
    )


def test_the_faster_of_both_is_taken_and_a_step_that_fits_in_slices() -> None:
    whole = make_plan(WHOLE, TIGHT)
    assert is_faster(whole, sliced(70.0), TIGHT.budget) and not is_faster(whole, sliced(69.5), TIGHT.budget)
    assert not is_faster(whole, sliced(90.0), TIGHT.budget - 100)
    assert needs_none(sliced(70.0)) and not needs_none(whole)


def test_a_step_that_no_plan_makes_fit_is_known_without_prices() -> None:
    bare = replace(WHOLE, ops=tuple(replace(op, us=0.0) for op in WHOLE.ops))
    assert has_room(bare, TIGHT)
    assert not has_room(bare, Machine(1_900))
    with pytest.raises(BudgetError):
        make_plan(WHOLE, Machine(1_900))


@pytest.fixture
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "SMALLEST_OFFLOAD", 1)


@pytest.mark.usefixtures("small_copies")
@settings(max_examples=40, deadline=None)
@given(traces(max_forward=12), machines((0.5, 3.0)), st.floats(0.3, 1.0), st.floats(0.5, 1.5))
def test_what_is_proven_of_plans_beside_another_holds_for_those_of_a_longer_search(
    trace: Trace, machine: Machine, share: float, times: float
) -> None:
    captured = predict(trace, machine)
    machine = replace(machine, budget=int(share * captured.peak))
    below = times * captured.us
    found = make_plan(trace, machine, BESIDE, below=below)
    try:
        longer = make_plan(trace, machine)
    except BudgetError:
        assert found.forecast.peak > machine.budget
        return
    proven = found.least.once_us if longer.is_single else found.least.any_us
    assert proven <= longer.forecast.us * (1 + 1e-9)
    if found.forecast.peak <= machine.budget:
        assert found.lower_bound <= found.forecast.us * (1 + 1e-9)
