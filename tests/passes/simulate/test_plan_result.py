"""Properties that PlanResult derives from its forecasts."""

from __future__ import annotations

import pytest

from passes import Machine, PlanResult, parse, parse_plan, predict

STEP = parse(
    "forward:\na = aten.mm.default()  # f32[8] | makes a:32 | 0.1 us\nb = aten.mm.default(a)  # f32[8] | makes b:32 | 0.2 us\nreturn output b\n"
)
LONGER = parse("forward:\na = aten.mm.default()  # f32[8] | makes a:32 | 0.6 us\nreturn output a\n")


def test_a_plan_that_reaches_the_bound_is_not_below_it_by_a_last_bit() -> None:
    plain, planned = predict(STEP, Machine(1 << 20)), predict(LONGER, Machine(1 << 20))
    assert plain.us + 0.3 > planned.us  # 0.1 + 0.2 + 0.3 is not 0.6
    choice = PlanResult((), plain, planned, bound_us=0.3)
    assert choice.lower_bound == planned.us
    assert choice.gap == 0.0


def test_a_bound_above_the_plan_is_shown_as_it_is() -> None:
    plain, planned = predict(STEP, Machine(1 << 20)), predict(LONGER, Machine(1 << 20))
    assert PlanResult((), plain, planned, bound_us=0.4).lower_bound > planned.us


CHAIN = parse("""
    forward:
    x = input()  # u8[4] | makes x:4
    d = tangent()  # u8[4] | makes d:4
    a = f(x)  # u8[9] | makes a:9 | 1.0 us
    b = f(a)  # u8[9] | makes b:9 | 1.0 us
    o = f(b)  # u8[4] | makes o:4 | 1.0 us
    backward:
    p = g(d, b)  # u8[4] | makes p:4 | 1.0 us
    q = g(p, a)  # u8[4] | makes q:4 | 1.0 us
    return output o, gradient q
""")


@pytest.mark.parametrize(
    ("plan", "is_single"),
    [
        ("recompute a: before q", True),
        ("recompute a: before p\nrecompute b: before p", True),
        ("recompute a: before p", False),  # of the first class a runs again when it is read
        ("recompute b: before q", False),
        ("recompute a: before p\nrecompute b: before p\nrecompute a: before q", False),
    ],
)
def test_a_plan_that_recomputes_twice_or_early_is_not_single(plan: str, is_single: bool) -> None:
    plain = predict(CHAIN, Machine(1 << 20))
    choice = PlanResult(parse_plan(plan), plain, plain, bound_us=2.0, any_us=1.0)
    assert choice.is_single == is_single
    assert choice.lower_bound == plain.us + (2.0 if is_single else 1.0)
