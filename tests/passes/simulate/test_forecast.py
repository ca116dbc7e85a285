"""The bytes at every op, to the byte; the time of every queue; and no byte depends on the time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from passes import KINDS, Forecast, Link, Machine, Offload, Op, Plan, Recompute, Reload, Trace, apply, parse, predict
from passes.ir.trace import type_nbytes
from tests.support.interpreter import run
from tests.support.strategies import machines, planned, traces

STEP = parse("""
    forward:
    w = parameter()  # makes w:50
    d = tangent()  # makes d:20
    a = mm(w)  # u8[100] | makes a:100 | 10.0 us
    b = relu(a)  # u8[100] | makes b:100 | 10.0 us
    c = mm(b)  # u8[100] | makes c:100 | 10.0 us | workspace 1000
    o = sum(c)  # u8[4] | makes o:4 | 10.0 us
    backward:
    e = expand(d)  # u8[20] | makes e:20 | 10.0 us
    f = mm_backward(e, b)  # u8[100] | makes f:100 | 10.0 us
    g = relu_backward(f, a)  # u8[50] | makes g:50 | 10.0 us
    return output o, gradient g
""")
AWAY = (Offload("a", out="b", free="c"), Reload("a", back="e", use="g"))
MACHINE = Machine(0, link=Link(out=10.0, back=10.0, staging=7))


def bytes_of(forecast: Forecast) -> str:
    """A line an op: the bytes while it runs, by kind."""
    lines = []
    for i, op in enumerate(forecast.trace.ops):
        kinds = ", ".join(f"{kind} {nbytes[i]}" for kind, nbytes in forecast.by_kind.items() if nbytes[i])
        lines.append(f"{op.name}: {forecast.total[i]} = {kinds}")
    return "\n".join(lines) + "\n"


def times_of(forecast: Forecast) -> str:
    """When each op begins, and each copy runs."""
    lines = [
        f"{begin:g} {op.name}" for op, begin in zip(forecast.trace.ops, forecast.begins, strict=True) if not op.is_input
    ]
    copies = [f"{copy.queue}: {copy.value} {copy.begin:g} to {copy.end:g}" for copy in forecast.copies]
    return "\n".join([*lines, f"{forecast.us:g} end", *copies]) + "\n"


def test_every_byte_has_a_kind() -> None:
    forecast = predict(STEP, MACHINE)
    assert tuple(forecast.by_kind) == KINDS
    assert_expected_inline(
        bytes_of(forecast),
        """\
w: 50 = parameter 50
d: 50 = parameter 50
a: 150 = parameter 50, activation 100
b: 250 = parameter 50, activation 200
c: 1350 = parameter 50, activation 200, temporary 100, workspace 1000
o: 354 = parameter 50, output 4, activation 200, temporary 100
e: 294 = parameter 50, tangent 20, output 4, activation 200, temporary 20
f: 394 = parameter 50, tangent 20, output 4, activation 200, temporary 120
g: 324 = parameter 50, gradient 50, tangent 20, output 4, activation 100, temporary 100
""",
    )


def test_a_recompute_moves_bytes_to_where_they_are_used() -> None:
    assert_expected_inline(
        bytes_of(predict(apply(STEP, (Recompute("a", before="g"),)), MACHINE)),
        """\
w: 50 = parameter 50
d: 50 = parameter 50
a: 150 = parameter 50, temporary 100
b: 250 = parameter 50, activation 100, temporary 100
c: 1250 = parameter 50, activation 100, temporary 100, workspace 1000
o: 254 = parameter 50, output 4, activation 100, temporary 100
e: 194 = parameter 50, tangent 20, output 4, activation 100, temporary 20
f: 294 = parameter 50, tangent 20, output 4, activation 100, temporary 120
a__1: 274 = parameter 50, tangent 20, output 4, temporary 200
g: 324 = parameter 50, gradient 50, tangent 20, output 4, temporary 200
""",
    )


def test_an_offloaded_value_takes_no_bytes_and_staging_takes_some_throughout() -> None:
    assert_expected_inline(
        bytes_of(predict(apply(STEP, AWAY), MACHINE)),
        """\
w: 57 = parameter 50, staging 7
d: 57 = parameter 50, staging 7
a: 157 = parameter 50, temporary 100, staging 7
b: 257 = parameter 50, activation 100, temporary 100, staging 7
a__out: 257 = parameter 50, activation 100, temporary 100, staging 7
c: 1357 = parameter 50, activation 100, temporary 200, workspace 1000, staging 7
a__free: 357 = parameter 50, activation 100, temporary 200, staging 7
o: 261 = parameter 50, output 4, activation 100, temporary 100, staging 7
a__in_1: 281 = parameter 50, tangent 20, output 4, activation 200, staging 7
e: 301 = parameter 50, tangent 20, output 4, activation 200, temporary 20, staging 7
f: 401 = parameter 50, tangent 20, output 4, activation 200, temporary 120, staging 7
a__back_1: 281 = parameter 50, tangent 20, output 4, activation 100, temporary 100, staging 7
g: 331 = parameter 50, gradient 50, tangent 20, output 4, activation 100, temporary 100, staging 7
""",
    )


def test_the_peak_is_the_first_op_with_the_most_bytes() -> None:
    forecast = predict(STEP, MACHINE)
    assert (forecast.peak_index, forecast.peak) == (4, 1350)
    assert str(forecast) == "1350 bytes at c, 70 us"
    even = predict(parse("a = f()  # makes a:8\nb = f()  # makes b:8"), MACHINE)
    assert (even.peak_index, even.peak) == (0, 8)


def test_what_is_alive_at_an_op_is_listed_with_the_largest_first() -> None:
    forecast = predict(STEP, MACHINE)
    assert [life.storage for life in forecast.live_at(forecast.peak_index)] == ["a", "b", "c", "w"]
    assert [life.storage for life in forecast.live_at(8)] == ["a", "f", "w", "g", "d", "o"]


def test_a_step_of_nothing_needs_nothing() -> None:
    forecast = predict(Trace(()), MACHINE)
    assert (forecast.peak, forecast.us, forecast.copies, forecast.begins) == (0, 0.0, (), ())
    assert str(forecast) == "0 bytes at nothing, 0 us"


def test_a_fast_link_costs_no_time() -> None:
    assert_expected_inline(
        times_of(predict(apply(STEP, AWAY), MACHINE)),
        """\
0 a
10 b
20 a__out
20 c
30 a__free
30 o
40 a__in_1
40 e
50 f
60 a__back_1
60 g
70 end
out: a__out 20 to 30
back: a__in_1 40 to 50
""",
    )


def test_compute_waits_for_a_slow_link_in_both_directions() -> None:
    assert_expected_inline(
        times_of(predict(apply(STEP, AWAY), replace(MACHINE, link=replace(MACHINE.link, out=5.0, back=2.0)))),
        """\
0 a
10 b
20 a__out
20 c
30 a__free
40 o
50 a__in_1
50 e
60 f
70 a__back_1
100 g
110 end
out: a__out 20 to 40
back: a__in_1 50 to 100
""",
    )


def test_copies_of_one_direction_queue_and_those_of_two_do_not() -> None:
    plan = (
        Offload("a", out="b", free="c"), Offload("b", out="c", free="o"), Reload("b", back="e", use="f"), Reload("a", back="e", use="g"),
    )  # fmt: skip
    assert_expected_inline(
        times_of(predict(apply(STEP, plan), replace(MACHINE, link=replace(MACHINE.link, out=4.0)))),
        """\
0 a
10 b
20 a__out
20 c
30 a__free
45 b__out
45 o
55 b__free
70 b__in_1
70 a__in_1
70 e
80 b__back_1
80 f
90 a__back_1
90 g
100 end
out: a__out 20 to 45
out: b__out 45 to 70
back: b__in_1 70 to 80
back: a__in_1 80 to 90
""",
    )


def test_without_a_tier_the_clock_still_runs() -> None:
    assert predict(apply(STEP, AWAY), Machine(0)).us == 240  # at a byte a microsecond


@given(planned(), machines())
def test_every_byte_is_foreseen(both: tuple[Trace, Plan], machine: Machine) -> None:
    applied = apply(*both)
    staging = machine.link.staging if any(isinstance(decision, Offload | Reload) for decision in both[1]) else 0
    forecast = predict(applied, machine)
    assert list(forecast.total) == [
        nbytes + staging for nbytes in run(applied, machine.streaming.window, machine.streaming.update_staging).nbytes
    ]
    assert forecast.peak == max(forecast.total)
    assert all((nbytes >= 0).all() for nbytes in forecast.by_kind.values())


@given(planned(), machines(), machines())
def test_bytes_do_not_depend_on_time(both: tuple[Trace, Plan], machine: Machine, other: Machine) -> None:
    applied = apply(*both)
    slow = replace(applied, ops=tuple(replace(op, us=3 * op.us + 1) for op in applied.ops))
    same = replace(other, link=replace(other.link, staging=machine.link.staging), streaming=machine.streaming)
    here, there = predict(applied, machine), predict(slow, same)
    assert here.lifetimes == there.lifetimes
    assert list(here.total) == list(there.total)


@given(planned(), machines())
def test_copies_of_a_queue_are_first_in_first_out(both: tuple[Trace, Plan], machine: Machine) -> None:
    forecast = predict(apply(*both), machine)
    for queue in ("out", "back"):
        copies = [copy for copy in forecast.copies if copy.queue == queue]
        assert all(copy.begin <= copy.end for copy in copies)
        assert all(before.end <= after.begin for before, after in pairwise(copies))


@given(planned(), machines())
def test_nothing_passes_a_wait_before_its_copy_has_ended(both: tuple[Trace, Plan], machine: Machine) -> None:
    forecast = predict(apply(*both), machine)
    copies = {copy.value: copy for copy in forecast.copies}
    ends = [*forecast.begins[1:], forecast.us]
    for op, begin, end in zip(forecast.trace.ops, forecast.begins, ends, strict=True):
        match op.fn:
            case "memgraph.offload.default" | "memgraph.reload.default":
                copy = copies[op.name]
                there = op if op.fn == "memgraph.reload.default" else forecast.trace.op[op.reads[0]]
                nbytes = forecast.trace.nbytes[there.holds[0]]
                assert begin <= copy.begin
                assert end == begin + (machine.link.call_us + machine.link.us_per_byte * nbytes)
            case "memgraph.free.default" | "memgraph.wait.default":
                assert end == max(begin, copies[op.reads[0]].end)
            case "memgraph.narrow.default":
                wide = forecast.trace.nbytes[forecast.trace.op[op.reads[0]].holds[0]]
                assert end == begin + wide / machine.cast.out and wide == 2 * op.nbytes
            case "memgraph.widen.default":
                assert end == begin + op.nbytes / machine.cast.back
            case _ if op.phase == "update":
                least = max(op.us, far_us(forecast.trace, op, machine))
                assert end - begin >= least * (1 - 1e-9) - 1e-6
                assert (
                    machine.link.half_duplex or machine.streaming.update_staging or end - begin == pytest.approx(least)
                )
            case _:
                assert end == begin + op.us
    for op in forecast.trace.ops:
        if op.fn == "memgraph.reload.default" and not forecast.trace.op[op.reads[0]].offloaded:
            assert copies[op.name].begin >= copies[op.reads[0]].end


def far_us(trace: Trace, op: Op, machine: Machine) -> float:
    """Return the time of an update's copies from and to the tier."""
    reads = [trace.op[read] for read in op.reads]
    inputs = sum(type_nbytes(read.type) for read in reads if read.offloaded)
    left = sum(type_nbytes(trace.op[read.reads[0]].type) for read in reads if read.fn == "memgraph.offload.default")
    written = sum(type_nbytes(read.type) for read in reads if read.offloaded and read.fn != "gradient")
    return (inputs + left) / (machine.link.back or 1.0) + written / (machine.link.out or 1.0)


@given(planned(), machines())
def test_time_is_never_less_than_that_of_any_queue(both: tuple[Trace, Plan], machine: Machine) -> None:
    applied = apply(*both)
    forecast = predict(applied, machine)
    assert forecast.us >= sum(op.us for op in applied.ops)
    if not any(op.fn.startswith("memgraph.") or op.offloaded for op in applied.ops):
        assert forecast.us == sum(op.us for op in applied.ops)


@given(planned(), st.sampled_from((0.5, 3.0)), st.sampled_from((3.0, 100.0)))
def test_a_faster_link_never_costs_time(both: tuple[Trace, Plan], slow: float, fast: float) -> None:
    applied = apply(*both)
    assert (
        predict(applied, Machine(0, link=Link(out=fast, back=fast))).us
        <= predict(applied, Machine(0, link=Link(out=slow, back=slow))).us
    )


@given(traces(), machines())
def test_no_kind_is_counted_that_is_not_there(trace: Trace, machine: Machine) -> None:
    forecast = predict(trace, machine)
    assert not forecast.by_kind["staging"].any()
    assert sum(forecast.by_kind[kind].max() for kind in ("parameter", "buffer", "input")) == 300
