"""`make_plan` asks the passes in their order, and plans nothing for a step that fits as it is."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from unittest import mock

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import (
    PASSES,
    BrokenTrace,
    BudgetError,
    Link,
    Machine,
    Plan,
    PlanResult,
    Recompute,
    Trace,
    apply,
    make_plan,
    parse,
    pipeline,
    predict,
)
from passes.ir.machine import rates, with_rates
from passes.pipeline import FITTING, QUICK, Pass
from tests.support.strategies import machines, traces

STEP = parse("""
    forward:
    w = parameter()  # u8[50] | makes w:50
    x = input()  # u8[100] | makes x:100
    d = tangent()  # u8[4] | makes d:4
    a = mm(x, w)  # u8[1000] | makes a:1000 | 10.0 us | at layers.0 model.py:7
    b = gelu(a)  # u8[1000] | makes b:1000 | 10.0 us | at layers.0 model.py:8
    o = mm(b, w)  # u8[4] | makes o:4 | 10.0 us | workspace 700 | at head model.py:9
    backward:
    p = mm_backward(d, b)  # u8[100] | makes p:100 | 10.0 us | at head model.py:9
    q = gelu_backward(p, a)  # u8[100] | makes q:100 | 10.0 us | at layers.0 model.py:8
    r = mm_backward(q, x)  # u8[50] | makes r:50 | 10.0 us | at layers.0 model.py:7
    return output o, gradient r
""")
ONE_OP = parse("forward:\na = f()  # makes a:8 | workspace 2\nreturn output a")
FORWARD_ONLY = parse("""
    x = input()  # u8[8] | makes x:8
    a = f(x)  # u8[8] | makes a:8 | 1.0 us
    b = f(a)  # u8[8] | makes b:8 | 1.0 us
    c = f(b, a)  # u8[8] | makes c:8 | 1.0 us
    return output c
""")
BACKWARD_ONLY = parse("backward:\nd = tangent()  # makes d:8\na = f(d)  # makes a:8\nreturn gradient a")
NO_BYTES = parse("""
    forward:
    x = input()  # u8[0] | makes x:0
    a = f(x)  # u8[0] | makes a:0
    backward:
    b = g(a)  # u8[0] | makes b:0
    return gradient b
""")
PEAK, FLOOR = 2854, 2150  # at o; at b, where a is needed to make b


def test_a_step_that_fits_is_left_as_it_is() -> None:
    for budget in (PEAK, PEAK + 1, 10**15):
        choice = make_plan(STEP, Machine(budget, link=Link(out=1.0, back=1.0, staging=10**9)))
        assert choice.plan == ()
        assert choice.forecast is choice.captured
        assert choice.forecast.trace == STEP


def test_the_error_says_what_is_in_the_way() -> None:
    with pytest.raises(BudgetError) as raised:
        make_plan(STEP, Machine(1500))
    assert (raised.value.budget, raised.value.smallest) == (1500, FLOOR)
    assert_expected_inline(
        str(raised.value) + "\n",
        """\
1500 bytes are allowed; the smallest budget for which a plan was found is 2150.
Peak memory is at b (gelu, layers.0 model.py:8). Live on cpu at that point:
            1000 bytes  temporary  a u8[1000] layers.0 model.py:7
            1000 bytes  activation b u8[1000] layers.0 model.py:8
             100 bytes  input      x u8[100]
              50 bytes  parameter  w u8[50]
No plan can use less than 2150 bytes: that many are in use at b at the same time.
Most of that is activation (2000 bytes).
Give budget=2150, or smaller batches, whose gradients add up, or microbatches= (the batch in more parts within the step), if its rows do not need each other.
""",
    )


def test_the_error_tells_of_workspace() -> None:
    with pytest.raises(BudgetError) as raised:
        make_plan(ONE_OP, Machine(9, device="cuda:0"))
    assert_expected_inline(
        str(raised.value) + "\n",
        """\
9 bytes are allowed; the smallest budget for which a plan was found is 10.
Peak memory is at a (f). Live on cuda:0 at that point:
               8 bytes  output     a
               2 bytes  workspace  of a itself
No plan can use less than 10 bytes: that many are in use at a at the same time.
Most of that is output (8 bytes).
Give budget=10, or smaller batches, whose gradients add up, or microbatches= (the batch in more parts within the step), if its rows do not need each other.
""",
    )


def keep_all(trace: Trace, machine: Machine, until: float) -> Plan:
    return ()


def make_a_again(trace: Trace, machine: Machine, until: float) -> Plan:
    return (Recompute("a", before="q"),)


def test_passes_run_in_order_until_one_fits() -> None:
    lines: list[str] = []

    def log(name: str, best: PlanResult) -> None:
        lines.append(f"{name:<16} {best.forecast}")

    choice = make_plan(STEP, Machine(FLOOR), tuple(map(Pass, (keep_all, make_a_again, keep_all))), log)
    assert choice.plan == (Recompute("a", before="q"),)
    assert_expected_inline(
        "\n".join(lines) + "\n",
        """\
captured         2854 bytes at o, 60 us
keep_all         2854 bytes at o, 60 us
make_a_again     2150 bytes at b, 70 us
keep_all         2150 bytes at b, 70 us
""",
    )


def test_the_lowest_of_all_plans_is_what_an_error_names() -> None:
    with pytest.raises(BudgetError) as raised:
        make_plan(STEP, Machine(5), (Pass(make_a_again), Pass(keep_all)))
    assert raised.value.smallest == predict(apply(STEP, (Recompute("a", before="q"),)), Machine(5)).peak < PEAK


@pytest.mark.parametrize("budget", [1, FLOOR - 1])
def test_the_plan_of_the_budget_that_an_error_names_is_logged(budget: int) -> None:
    logged: list[PlanResult] = []
    with pytest.raises(BudgetError) as raised:
        make_plan(STEP, Machine(budget), QUICK, lambda name, best: logged.append(best))
    assert logged[-1].forecast.peak == raised.value.smallest == FLOOR


def test_a_pass_that_breaks_the_step_is_found_out() -> None:
    def break_it(trace: Trace, machine: Machine, until: float) -> Plan:
        return (Recompute("o", before="r"),)

    once = parse(str(STEP).replace("workspace 700", "workspace 700 | once"))
    with pytest.raises(BrokenTrace, match="which may run once"):
        make_plan(once, Machine(5), (Pass(break_it),))


def test_a_broken_step_is_not_planned() -> None:
    with pytest.raises(BrokenTrace):
        make_plan(parse("a = f(b)"), Machine(10**9))


@pytest.mark.parametrize(
    "trace", [ONE_OP, FORWARD_ONLY, BACKWARD_ONLY, NO_BYTES], ids=["one op", "forward", "backward", "no bytes"]
)
@pytest.mark.parametrize("link", [0.0, 1.0])
def test_a_step_in_which_nothing_can_be_decided_fits_or_does_not(trace: Trace, link: float) -> None:
    machine = Machine(0, link=Link(out=link, back=link))
    peak = predict(trace, machine).peak
    assert make_plan(trace, replace(machine, budget=peak)).plan == ()
    with pytest.raises(BudgetError) as raised:
        make_plan(trace, replace(machine, budget=peak - 1))
    assert raised.value.smallest == peak


def test_a_step_of_nothing_fits_in_nothing() -> None:
    assert make_plan(Trace(()), Machine(0)).plan == ()


def test_a_budget_below_nothing_is_refused_with_the_smallest() -> None:
    with pytest.raises(BudgetError) as raised:
        make_plan(STEP, Machine(-5))
    assert raised.value.smallest == FLOOR


@settings(max_examples=20)
@given(traces(), machines())
def test_a_budget_that_fits_as_it_is_gives_no_decisions(trace: Trace, machine: Machine) -> None:
    peak = predict(trace, machine).peak
    assert make_plan(trace, replace(machine, budget=peak)).plan == ()
    plan = outcome(trace, replace(machine, budget=peak - 1))
    assert isinstance(plan, int) or (plan.plan and plan.forecast.peak < peak)


@pytest.mark.long
@settings(max_examples=20)
@given(traces(), machines())
def test_the_same_step_gives_the_same_plan(trace: Trace, machine: Machine) -> None:
    tight = replace(machine, budget=predict(trace, machine).peak * 3 // 4)
    first, second = outcome(trace, tight), outcome(parse(str(trace)), tight)
    if isinstance(first, int) or isinstance(second, int):
        assert first == second
    else:
        assert first.plan == second.plan
        assert str(first.forecast.trace) == str(second.forecast.trace)


@settings(max_examples=20)
@given(traces(), machines())
def test_a_choice_is_what_its_plan_makes_of_the_step(trace: Trace, machine: Machine) -> None:
    choice = outcome(trace, replace(machine, budget=predict(trace, machine).peak * 3 // 4))
    if not isinstance(choice, int):
        assert choice.captured.trace == trace
        assert choice.forecast.trace == apply(trace, choice.plan)
        assert choice.forecast.peak <= choice.captured.peak


@pytest.mark.long
@settings(max_examples=30)
@given(traces(max_forward=20), machines(), st.lists(st.sampled_from((0.0, 0.1, 1.0, 30.0)), min_size=1, max_size=9))
def test_a_budget_that_an_error_names_works_whatever_ops_and_copies_take(
    trace: Trace, machine: Machine, times: list[float]
) -> None:
    named = outcome(trace, replace(machine, budget=0))
    assert isinstance(named, int)
    factor = itertools.cycle(times)
    repriced = replace(trace, ops=tuple(replace(op, us=op.us * next(factor)) for op in trace.ops))
    rated = with_rates(machine, [rate * (next(factor) or 0.01) for rate in rates(machine)])
    assert outcome(repriced, replace(rated, budget=0)) == named
    choice = outcome(repriced, replace(rated, budget=named))
    assert not isinstance(choice, int) and choice.forecast.peak <= named


def outcome(trace: Trace, machine: Machine) -> PlanResult | int:
    """Return the plan, or the smallest budget."""
    try:
        return make_plan(trace, machine, PASSES)
    except BudgetError as error:
        return error.smallest


@settings(max_examples=30)
@given(traces(max_forward=20), machines((0.5, 3.0)))
def test_a_tier_makes_no_plan_worse(trace: Trace, machine: Machine) -> None:
    budget = predict(trace, machine).peak * 3 // 4
    try:
        home = make_plan(trace, Machine(budget))
    except BudgetError:
        return
    choice = make_plan(trace, replace(machine, budget=budget))
    assert choice.forecast.us <= home.forecast.us or choice.gap <= 0.02


def test_a_slow_tier_makes_no_plan_worse_than_one_that_recomputes_more_often() -> None:
    trace = parse("""
        forward:
        a = aten.plain.default()  # u8[8911] | makes a:8911 | 57.5 us
        b = aten.several.default()  # u8[9910], u8[4955] | makes b.0:9910, b.1:4955 | 26.0 us | workspace 420
        b_0 = getitem(b)  # u8[9910] | holds b.0
        c = aten.dropout.default(a)  # u8[9437], u8[4718], u8[3145] | makes c.0:9437, c.1:4718, c.2:3145 | 45.5 us | draws 16
        c_0 = getitem(c)  # u8[9437] | holds c.0
        c_2 = getitem(c)  # u8[3145] | holds c.2
        d = aten.plain.default()  # u8[7533] | makes d:7533 | 28.0 us | workspace 750
        e = aten.once.default()  # u8[9619] | makes e:9619 | 13.0 us | once
        f = aten.dropout.default()  # u8[5850], u8[2925], u8[1950] | makes f.0:5850, f.1:2925, f.2:1950 | 7.25 us | draws 16
        f_0 = getitem(f)  # u8[5850] | holds f.0
        f_2 = getitem(f)  # u8[1950] | holds f.2
        g = aten.once.default()  # u8[2549] | makes g:2549 | 0.5 us | workspace 3510 | once
        h = aten.once.default()  # f32[2118] | makes h:8472 | 49.5 us | once
        backward:
        i = aten.view.default(g)  # u8[7] | holds g
        j = aten.plain.default()  # u8[1686] | makes j:1686 | 5.5 us | workspace 3030
        k = aten.plain.default(f_2)  # f32[0] | makes k:0
        l = aten.plain.default(f_0, c_0)  # u8[543] | makes l:543 | 62.25 us | workspace 4590
        m = aten.view.default(e)  # u8[7] | holds e
        n = aten.several.default(c_2)  # f32[1592], f32[796], u8[2122] | makes n.0:6368, n.1:3184, n.2:2122 | 22.5 us
        o = aten.random.default(c_0)  # u8[7378] | makes o:7378 | 4.75 us | workspace 3300 | draws 16
        p = aten.plain.default(d)  # f32[0] | makes p:0
        return output b_0, gradient j, gradient l, gradient o
    """)  # fmt: skip
    budget = predict(trace, Machine(0)).peak * 39 // 50
    home, choice = (make_plan(trace, Machine(budget, link=link)) for link in (Link(), Link(out=0.5, back=0.5)))
    assert choice.forecast.us <= home.forecast.us


def test_a_quick_pass_that_needs_the_tier_to_fit_runs_only_if_nothing_else_does() -> None:
    order: list[str] = []

    def offloading(trace: Trace, machine: Machine, until: float) -> Plan:
        order.append("offloading")
        return ()

    def recomputing(trace: Trace, machine: Machine, until: float) -> Plan:
        order.append("recomputing")
        return (Recompute("a", before="q"),)

    passes = (Pass(recomputing, quick=True), Pass(offloading, offloads=True, quick=True))
    for budget, link, expected in (
        (FLOOR - 1, Link(out=1.0, back=1.0), ["offloading", "recomputing"]),  # the bytes in use at b exceed it
        (FLOOR - 1, Link(), ["recomputing"]),  # it needs no more than every plan does
        (FLOOR, Link(out=1.0, back=1.0), ["recomputing", "offloading"]),
    ):
        order.clear()
        with suppress(BudgetError):
            make_plan(STEP, Machine(budget, link=link), passes)
        assert order == expected


@pytest.mark.long
@given(traces(), machines())
def test_the_order_of_passes_that_can_not_fit_changes_no_plan_and_no_budget_that_is_named(
    trace: Trace, machine: Machine
) -> None:
    def planned() -> tuple[Plan, int]:
        try:
            return make_plan(trace, machine, FITTING).plan, 0
        except BudgetError as error:
            return (), error.smallest

    with mock.patch.object(pipeline, "_least_without_offload", lambda *_: 0):
        in_order = planned()
    assert planned() == in_order
