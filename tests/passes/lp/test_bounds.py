"""Proven bounds hold for random plans."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from passes import BudgetError, Machine, PlanResult, Recompute, Stream, Trace, apply, make_plan, predict
from tests.support.strategies import machines, plans, traces

SMALL = 1e-6


@given(traces(max_forward=12), machines((0.0, 0.5, 3.0, 100.0)), st.data())
def test_no_random_plan_beats_the_bound_of_a_budget_that_it_just_fits(
    trace: Trace, machine: Machine, data: st.DataObject
) -> None:
    """Draw plans that recompute in backward only, cast nothing and stream nothing, which these machines don't allow.

    A BudgetError is allowed, because the search may miss.
    """
    plan = data.draw(plans(trace))
    place = {op.name: i for i, op in enumerate(trace.ops)}
    for each in plan:
        if isinstance(each, Recompute):
            assume(place[each.before] >= trace.boundary)
        else:
            assume(machine.link.out and not isinstance(each, Stream) and not getattr(each, "wire", ""))
    forecast = predict(apply(trace, plan), machine)
    try:
        choice = make_plan(trace, replace(machine, budget=forecast.peak))
    except BudgetError:
        return
    assert choice.forecast.peak <= forecast.peak
    assert choice.forecast.us >= choice.lower_bound - SMALL
    other = PlanResult(plan, choice.captured, forecast, choice.bound_us, choice.any_us)
    assert forecast.us >= other.lower_bound - SMALL
