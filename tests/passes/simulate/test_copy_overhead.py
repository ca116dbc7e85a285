"""A copy takes compute: so much to be begun and seen to its end, and so much for each of its bytes."""

from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from passes import Link, Machine, Offload, Plan, Reload, Trace, apply, make_plan, parse, predict
from tests.passes.simulate.test_forecast import AWAY, MACHINE, STEP, times_of
from tests.support.strategies import machines, planned


def test_compute_pays_for_a_copy_where_it_begins_and_the_link_does_not() -> None:
    machine = replace(MACHINE, link=replace(MACHINE.link, call_us=3.0, us_per_byte=0.02))
    assert machine.link.overhead_us(100) == 5.0
    assert_expected_inline(
        times_of(predict(apply(STEP, AWAY), machine)),
        """\
0 a
10 b
20 a__out
25 c
35 a__free
35 o
45 a__in_1
50 e
60 f
70 a__back_1
70 g
80 end
out: a__out 20 to 30
back: a__in_1 45 to 55
""",
    )


def test_what_compute_would_have_waited_anyway_costs_nothing() -> None:
    slow = replace(MACHINE, link=replace(MACHINE.link, out=5.0, back=2.0))
    plain, paid = (
        predict(apply(STEP, AWAY), machine)
        for machine in (slow, replace(slow, link=replace(slow.link, call_us=3.0, us_per_byte=0.02)))
    )
    assert plain.us == paid.us == 110


LONG_US = 700_000.0
LONG = parse("""
    forward:
    w = parameter()  # makes w:1000
    d = tangent()  # makes d:100
    a = mm(w)  # u8[4194304] | makes a:4194304 | 100000.0 us
    b = relu(a)  # u8[4194304] | makes b:4194304 | 100000.0 us
    c = mm(b)  # u8[4194304] | makes c:4194304 | 100000.0 us
    o = sum(c)  # u8[4] | makes o:4 | 100000.0 us
    backward:
    e = expand(d)  # u8[20] | makes e:20 | 100000.0 us
    f = mm_backward(e, c)  # u8[4194304] | makes f:4194304 | 100000.0 us
    g = relu_backward(f, a)  # u8[50] | makes g:50 | 100000.0 us
    return output o, gradient g
""")


def test_a_plan_offloads_what_costs_less_than_its_recompute() -> None:
    budget = predict(LONG, Machine(1 << 30)).peak - (1 << 20)
    cheap = Machine(budget, link=Link(out=1000.0, back=1000.0, call_us=50.0))
    dear = replace(cheap, link=replace(cheap.link, us_per_byte=0.1))  # 0.4 s a copy
    sent, kept = (make_plan(LONG, machine) for machine in (cheap, dear))
    assert any(isinstance(decision, Offload) for decision in sent.plan)
    assert 99.0 < sent.bound_us <= 100.0 <= sent.forecast.us - LONG_US
    assert not any(isinstance(decision, Offload | Reload) for decision in kept.plan)


def _copies(trace: Trace) -> int:
    return sum(op.fn in ("memgraph.offload.default", "memgraph.reload.default") for op in trace.ops)


@given(planned(), machines(), st.sampled_from((1.0, 5.0)))
def test_copy_overhead_never_makes_a_step_faster_nor_slower_than_its_sum(
    both: tuple[Trace, Plan], machine: Machine, more: float
) -> None:
    applied = apply(*both)
    before, after = (
        predict(applied, each).us
        for each in (machine, replace(machine, link=replace(machine.link, call_us=machine.link.call_us + more)))
    )
    assert before <= after <= before + more * _copies(applied) + 1e-6
