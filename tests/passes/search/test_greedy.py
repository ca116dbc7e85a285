"""The way down gives up first what costs least, and its peaks fall with the budget."""

from __future__ import annotations

import random
from dataclasses import replace

from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import (
    BudgetError,
    Link,
    Machine,
    Offload,
    PlanResult,
    Recompute,
    Trace,
    apply,
    check,
    make_plan,
    parse,
    predict,
)
from passes.pipeline import Pass
from passes.search.greedy import greedy_plan, greedy_plan_no_offload
from tests.support.interpreter import run
from tests.support.processes import printed
from tests.support.strategies import LINKS, decoded, machines, traces

# Convolutions are dear and relus cheap; all weigh the same, but e, which weighs more.
STEP = parse("""
    forward:
    x = input()  # u8[100] | makes x:100
    d = tangent()  # u8[4] | makes d:4
    a = conv(x)  # u8[1000] | makes a:1000 | 500.0 us
    b = relu(a)  # u8[1000] | makes b:1000 | 5.0 us
    c = conv(b)  # u8[1000] | makes c:1000 | 500.0 us
    e = relu(c)  # u8[1500] | makes e:1500 | 5.0 us
    f = conv(e)  # u8[1000] | makes f:1000 | 500.0 us
    o = sum(f)  # u8[4] | makes o:4 | 5.0 us
    backward:
    p = sum_backward(d, f)  # u8[1000] | makes p:1000 | 5.0 us
    q = conv_backward(p, e)  # u8[1500] | makes q:1500 | 900.0 us
    r = relu_backward(q, c)  # u8[1000] | makes r:1000 | 5.0 us
    s = conv_backward(r, b)  # u8[1000] | makes s:1000 | 900.0 us
    t = relu_backward(s, a)  # u8[1000] | makes t:1000 | 5.0 us
    u = conv_backward(t, x)  # u8[100] | makes u:100 | 900.0 us
    return output o, gradient u
""")
GREEDY = Pass(greedy_plan, offloads=True), Pass(greedy_plan_no_offload)
NO_LINK, SLOW, FAST = (
    Machine(0),
    Machine(0, link=Link(out=1.0, back=1.0, staging=50)),
    Machine(0, link=Link(out=1000.0, back=1000.0, staging=50)),
)


def plan_greedily(trace: Trace, machine: Machine, passes: tuple[Pass, ...] = GREEDY) -> PlanResult:
    return make_plan(trace, machine, passes)


def way_down(trace: Trace, machine: Machine, passes: tuple[Pass, ...] = GREEDY) -> str:
    """The plan for each budget at which it changes."""
    budget = predict(trace, machine).peak
    lines: list[str] = []
    while True:
        try:
            choice = plan_greedily(trace, replace(machine, budget=budget), passes)
        except BudgetError as error:
            assert error.smallest == budget + 1
            return "\n".join([*lines, f"not {budget}"]) + "\n"
        assert plan_greedily(trace, replace(machine, budget=choice.forecast.peak), passes).plan == choice.plan
        lines.append(str(choice.forecast))
        lines += [f"    {decision}" for decision in choice.plan]
        budget = choice.forecast.peak - 1


def test_without_a_tier_what_is_cheap_is_recomputed_first() -> None:
    assert_expected_inline(
        way_down(STEP, NO_LINK),
        """\
7108 bytes at q, 4230 us
6108 bytes at q, 4235 us
    recompute b: before s
5108 bytes at q, 4735 us
    recompute a: before s
    recompute b: before s
4608 bytes at c__1, 5240 us
    recompute a: before r
    recompute b: before r
    recompute c: before r
    recompute b: before s
4108 bytes at q, 6240 us
    recompute a: before r
    recompute b: before r
    recompute c: before r
    recompute a: before s
    recompute b: before s
    recompute a: before t
not 4107
""",
    )


def test_a_slow_link_is_used_for_what_is_dear_to_make_again() -> None:
    assert_expected_inline(
        way_down(STEP, SLOW, GREEDY[:1]),
        """\
7108 bytes at q, 4230 us
6158 bytes at q, 4325 us
    offload a: out b, free f
    reload a: back p, use s
    recompute b: before s
5158 bytes at q, 6315 us
    offload c: out e, free o
    reload c: back p, use r
    offload a: out b, free f
    reload a: back r, use s
    recompute b: before s
4658 bytes at r, 7220 us
    offload c: out e, free o
    reload c: back r, use r
    offload a: out b, free f
    reload a: back r, use s
    recompute b: before s
4650 bytes at f, 7225 us
    offload c: out e, free o
    reload c: back r, use r
    offload a: out b, free f
    reload a: back s, use s
    recompute b: before s
4158 bytes at q, 7225 us
    offload c: out e, free o
    reload c: back r, use r
    offload a: out b, free e
    reload a: back s, use s
    recompute b: before s
not 4157
""",
    )


def test_a_fast_link_carries_everything() -> None:
    assert_expected_inline(
        way_down(STEP, FAST),
        """\
7108 bytes at q, 4230 us
6158 bytes at q, 4230 us
    offload a: out b, free c
    reload a: back s, use t
5158 bytes at q, 4230 us
    offload b: out c, free e
    reload b: back r, use s
    offload a: out b, free c
    reload a: back s, use t
4658 bytes at r, 4231 us
    offload c: out e, free f
    reload c: back r, use r
    offload b: out c, free e
    reload b: back r, use s
    offload a: out b, free c
    reload a: back s, use t
4158 bytes at q, 4232 us
    offload c: out e, free f
    reload c: back r, use r
    offload b: out c, free e
    reload b: back s, use s
    offload a: out b, free c
    reload a: back s, use t
4108 bytes at q, 6240 us
    recompute a: before r
    recompute b: before r
    recompute c: before r
    recompute a: before s
    recompute b: before s
    recompute a: before t
not 4107
""",
    )


def test_the_result_of_an_op_that_runs_once_is_offloaded_or_stays() -> None:
    once = parse(str(STEP).replace("0 us\n", "0 us | once\n"))
    assert all(op.once for op in once.ops if not op.is_input)
    assert_expected_inline(
        way_down(once, NO_LINK),
        """\
7108 bytes at q, 4230 us
not 7107
""",
    )
    assert_expected_inline(
        way_down(once, FAST).split("us\n")[-1],
        """\
    offload c: out e, free f
    reload c: back r, use r
    offload b: out c, free e
    reload b: back s, use s
    offload a: out b, free c
    reload a: back s, use t
not 4157
""",
    )


def test_staging_that_costs_more_than_it_saves_is_not_paid() -> None:
    once = parse(str(STEP).replace("0 us\n", "0 us | once\n"))
    assert_expected_inline(
        way_down(once, replace(FAST, link=replace(FAST.link, staging=100_000))),
        """\
7108 bytes at q, 4230 us
not 7107
""",
    )


def test_the_lowest_plan_is_the_answer_if_none_fits() -> None:
    plan = greedy_plan(STEP, NO_LINK)
    with_least = plan_greedily(STEP, replace(NO_LINK, budget=predict(apply(STEP, plan), NO_LINK).peak))
    assert with_least.plan == plan


def floor(trace: Trace, machine: Machine) -> int:
    """The least budget for which there is a plan."""
    try:
        return plan_greedily(trace, replace(machine, budget=-1)).forecast.peak
    except BudgetError as error:
        return error.smallest


@settings(max_examples=20)
@given(traces(max_forward=18), machines())
def test_the_peak_falls_with_the_budget(trace: Trace, machine: Machine) -> None:
    most, least = predict(trace, machine).peak, floor(trace, machine)
    last = most
    for fifth in range(5, -1, -1):
        budget = least + (most - least) * fifth // 5
        choice = plan_greedily(trace, replace(machine, budget=budget))
        assert choice.forecast.peak <= min(budget, last)
        last = choice.forecast.peak
        assert plan_greedily(trace, replace(machine, budget=last)).plan == choice.plan
    assert last == least


@settings(max_examples=20)
@given(traces(max_forward=18), machines())
def test_the_smallest_budget_works_and_one_byte_less_does_not(trace: Trace, machine: Machine) -> None:
    least = floor(trace, machine)
    for budget in (least, least + 1):
        assert plan_greedily(trace, replace(machine, budget=budget)).forecast.peak == least or budget > least
    for budget in {least - 1, least // 2, 0} - {least}:
        assert floor(trace, replace(machine, budget=budget)) == least


@settings(max_examples=30)
@given(traces(), machines())
def test_the_lowest_plan_changes_no_value_and_breaks_no_invariant(trace: Trace, machine: Machine) -> None:
    applied = apply(trace, greedy_plan(trace, machine))
    check(applied)
    plain, decided = run(trace), run(applied)
    assert (decided.computed, decided.handed, decided.generator) == (plain.computed, plain.handed, plain.generator)
    assert max(decided.nbytes) <= max(plain.nbytes)


@settings(max_examples=20)
@given(traces(), machines(links=(0.0,)))
def test_no_link_copies_nothing(trace: Trace, machine: Machine) -> None:
    assert all(isinstance(decision, Recompute) for decision in greedy_plan(trace, machine))
    one_way = replace(machine, link=replace(machine.link, out=100.0))
    assert all(isinstance(decision, Recompute) for decision in greedy_plan(trace, one_way))


@settings(max_examples=20)
@given(traces(), machines(LINKS[1:]), st.integers(0, 30_000))
def test_no_more_is_offloaded_than_the_tier_holds(trace: Trace, machine: Machine, capacity: int) -> None:
    plan = greedy_plan(trace, replace(machine, link=replace(machine.link, capacity=capacity)))
    sent = [trace.op[decision.value].holds[0] for decision in plan if isinstance(decision, Offload)]
    assert sum(trace.nbytes[storage] for storage in sent) <= capacity


@settings(max_examples=20)
@given(traces(), machines())
def test_what_may_run_once_runs_once(trace: Trace, machine: Machine) -> None:
    whole = [op.makes and not op.is_input and op.fn != "aten.slice.default" for op in trace.ops]
    once = replace(trace, ops=tuple(replace(op, once=bool(alone)) for op, alone in zip(trace.ops, whole, strict=True)))
    plan = greedy_plan(once, machine)
    check(apply(once, plan))
    assert not any(once.op[decision.value].once for decision in plan if isinstance(decision, Recompute))


@settings(max_examples=20)
@given(traces(), machines())
def test_a_step_that_costs_nothing_can_be_planned(trace: Trace, machine: Machine) -> None:
    free = replace(trace, ops=tuple(replace(op, us=0.0) for op in trace.ops))
    assert floor(free, machine) <= predict(free, machine).peak


PLAN_EACH = """
import sys
from passes import Link, Machine, parse
from passes.search.greedy import greedy_plan
for text in sys.stdin.read().split("=====\\n"):
    print(*greedy_plan(parse(text), Machine(0, link=Link(50.0, 50.0))), sep="\\n", end="\\n\\n")
"""


def test_the_plan_does_not_depend_on_the_order_of_sets() -> None:
    """Sets of names iterate in another order in every process."""
    dice = random.Random(7)
    steps = [decoded([(dice.randbytes(10), dice.randbytes(10)) for _ in range(40)]) for _ in range(4)]
    here = printed(PLAN_EACH, steps)
    assert here.count("recompute") > 10 and here.count("offload") > 1
