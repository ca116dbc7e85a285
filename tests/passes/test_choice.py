"""What a choice derives of its forecasts."""

from __future__ import annotations

from passes import Choice, Machine, parse, predict

STEP = parse(
    "forward:\na = aten.mm.default()  # f32[8] | makes a:32 | 0.1 us\nb = aten.mm.default(a)  # f32[8] | makes b:32 | 0.2 us\nreturn output b\n"
)
LONGER = parse("forward:\na = aten.mm.default()  # f32[8] | makes a:32 | 0.6 us\nreturn output a\n")


def test_a_plan_that_reaches_the_bound_is_not_below_it_by_a_last_bit() -> None:
    plain, planned = predict(STEP, Machine(1 << 20)), predict(LONGER, Machine(1 << 20))
    assert plain.us + 0.3 > planned.us  # 0.1 + 0.2 + 0.3 is not 0.6
    choice = Choice((), plain, planned, bound_us=0.3)
    assert choice.lower_bound == planned.us
    assert choice.gap == 0.0


def test_a_bound_above_the_plan_is_shown_as_it_is() -> None:
    plain, planned = predict(STEP, Machine(1 << 20)), predict(LONGER, Machine(1 << 20))
    assert Choice((), plain, planned, bound_us=0.4).lower_bound > planned.us
