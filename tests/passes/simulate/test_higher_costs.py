"""A plan at higher prices has a new forecast, and its bounds stay true."""

from __future__ import annotations

import pytest

from passes import Machine, PlanResult, Recompute, apply, parse, predict
from passes.simulate.plan_result import with_higher_costs

MACHINE = Machine(1 << 30)
STEP = parse("""
forward:
x = input()  # f32[10] | makes x:40
a = relu(x)  # f32[10] | makes a:40 | 10.0 us
b = mm(a, x)  # f32[10] | makes b:40 | 30.0 us
backward:
c = mm(b, a)  # f32[10] | makes c:40 | 30.0 us
return gradient c
""")


def choice(bound: float) -> PlanResult:
    plan = (Recompute("a", before="c"),)
    plain, planned = predict(STEP, MACHINE), predict(apply(STEP, plan), MACHINE)
    assert planned.us == plain.us + 10
    return PlanResult(plan, plain, planned, bound_us=bound, any_us=bound)


def test_each_line_has_its_own_price_and_so_has_the_second_run_of_a_value() -> None:
    found = with_higher_costs(choice(8.0), MACHINE, {"a": 25.0, "b": 1.0})
    assert (found.captured.us, found.forecast.us) == (85.0, 95.0)
    assert found.plan == choice(8.0).plan


def test_no_plan_takes_less_than_was_proven_at_lower_prices_and_none_less_than_the_plain_step() -> None:
    little, much = (with_higher_costs(choice(8.0), MACHINE, {"a": us}) for us in (13.0, 25.0))
    assert little.lower_bound == 78.0 == choice(8.0).lower_bound
    assert much.lower_bound == 85.0
    assert much.gap == pytest.approx(95 / 85 - 1)


def test_without_a_higher_price_it_is_the_same() -> None:
    same = choice(8.0)
    assert with_higher_costs(same, MACHINE, {"a": 10.0, "else": 99.0}) is same
