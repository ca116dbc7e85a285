"""The way down gives up first what costs least, and its peaks fall with the budget."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
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
    Streaming,
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


@pytest.mark.long
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


# Its states are updated in windows, without staging; that of its parameters takes more than they are.
UPDATED = parse("""
    forward:
    state_0 = state()  # u8[262144] | makes state_0:262144
    state_1 = state()  # u8[262144] | makes state_1:262144
    state = state()  # makes state:2064
    a_weight = parameter()  # f32[256, 256] | makes a_weight:262144
    a_bias = parameter()  # f32[256] | makes a_bias:1024
    b_weight = parameter()  # f32[256, 256] | makes b_weight:262144
    b_bias = parameter()  # f32[256] | makes b_bias:1024
    input_0 = input()  # f32[8, 256] | makes input_0:8192
    tangent_0 = tangent()  # f32[] | makes tangent_0:4
    t = t.default(a_weight)  # f32[256, 256] | holds a_weight
    addmm = addmm.default(a_bias, input_0, t)  # f32[8, 256] | makes addmm:8192 | 110.8 us
    gelu = gelu.default(addmm)  # f32[8, 256] | makes gelu:8192 | 93.3 us
    t_1 = t.default(b_weight)  # f32[256, 256] | holds b_weight
    addmm_1 = addmm.default(b_bias, gelu, t_1)  # f32[8, 256] | makes addmm_1:8192 | 110.8 us
    gelu_1 = gelu.default(addmm_1)  # f32[8, 256] | makes gelu_1:8192 | 93.3 us
    pow_1 = pow.Tensor_Scalar(gelu_1)  # f32[8, 256] | makes pow_1:8192 | 120.1 us
    mean = mean.default(pow_1)  # f32[] | makes mean:4 | 147.8 us | workspace 12
    backward:
    expand = expand.default(tangent_0)  # f32[8, 256] | holds tangent_0
    div = div.Scalar(expand)  # f32[8, 256] | makes div:8192 | 80.6 us | workspace 12
    pow_2 = pow.Tensor_Scalar(gelu_1)  # f32[8, 256] | makes pow_2:8192 | 63.3 us
    mul = mul.Scalar(pow_2)  # f32[8, 256] | makes mul:8192 | 78.9 us | workspace 12
    mul_1 = mul.Tensor(div, mul)  # f32[8, 256] | makes mul_1:8192 | 53.2 us
    gelu_backward = gelu_backward.default(mul_1, addmm_1)  # f32[8, 256] | makes gelu_backward:8192 | 177.1 us
    mm = mm.default(gelu_backward, b_weight)  # f32[8, 256] | makes mm:8192 | 107.4 us
    t_3 = t.default(gelu_backward)  # f32[256, 8] | holds gelu_backward
    mm_1 = mm.default(t_3, gelu)  # f32[256, 256] | makes mm_1:262144 | 104.8 us
    update:
    b_weight_update = Adagrad.step(state_1, b_weight, mm_1)  # 7669.7 us | workspace 262156 | once
    backward:
    sum_1 = sum.dim_IntList(gelu_backward)  # f32[1, 256] | makes sum_1:1024 | 50.9 us
    view = view.default(sum_1)  # f32[256] | holds sum_1
    update:
    b_bias_update = Adagrad.step(state, b_bias, view)  # 556.3 us | workspace 1036 | once
    backward:
    gelu_backward_1 = gelu_backward.default(mm, addmm)  # f32[8, 256] | makes gelu_backward_1:8192 | 177.1 us
    t_6 = t.default(gelu_backward_1)  # f32[256, 8] | holds gelu_backward_1
    mm_2 = mm.default(t_6, input_0)  # f32[256, 256] | makes mm_2:262144 | 104.8 us
    update:
    a_weight_update = Adagrad.step(state_0, a_weight, mm_2)  # 7669.7 us | workspace 262156 | once
    backward:
    sum_2 = sum.dim_IntList(gelu_backward_1)  # f32[1, 256] | makes sum_2:1024 | 50.9 us
    view_1 = view.default(sum_2)  # f32[256] | holds sum_2
    update:
    a_bias_update = Adagrad.step(state, a_bias, view_1)  # 556.3 us | workspace 1036 | once
    return output mean
""")


RATES = (1.0, 10.0, 100.0, 1000.0, 10_000.0)


@given(out=st.sampled_from(RATES), back=st.sampled_from(RATES), call_us=st.floats(0.0, 1e4))
def test_no_rate_of_the_tier_hides_what_is_freed_without_staging(out: float, back: float, call_us: float) -> None:
    link = Link(out=out, back=back, call_us=call_us, staging=1 << 20, half_duplex=True)
    machine = Machine(0, link=link, streaming=Streaming(enabled=True, window=140_000))
    lowest = predict(apply(UPDATED, greedy_plan(UPDATED, machine)), machine)
    assert not lowest.staging
    assert lowest.peak < predict(UPDATED, machine).peak - 200_000
