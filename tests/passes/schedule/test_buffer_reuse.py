"""An op writes into the memory of a dead value of its size, where no peak rises."""

from __future__ import annotations

import pytest
from hypothesis import given

from passes import Machine, Plan, Trace, apply, parse, predict
from passes.ir.liveness import spans
from passes.schedule.buffer_reuse import reused_buffers, with_buffer_reuse
from tests.support.strategies import planned

STEP = """
forward:
x = input()  # f32[25] | makes x:100
a = aten.mm.default(x)  # f32[25] | makes a:100
b = aten.gelu.default(a)  # f32[50] | makes b:200
c = aten.mm.default(b)  # f32[25] | makes c:100
d = aten.view.default(c)  # f32[5, 5] | holds c
e = aten.gelu.default(d)  # f32[25] | makes e:100
backward:
t = tangent()  # f32[25] | makes t:100
f = aten.mul.Tensor(t, e)  # f32[25] | makes f:100
return output e, gradient f
"""


def _reused(text: str, smallest: int = 1) -> dict[str, str]:
    trace = parse(text)
    return reused_buffers(predict(trace, Machine(0)), {op.name for op in trace.ops}, smallest)


def test_a_dead_value_of_the_same_size_gives_its_memory() -> None:
    assert _reused(STEP) == {"c": "a"}
    made = with_buffer_reuse(parse(STEP), {"c": "a"})
    assert (made.op["c"].makes, made.op["c"].holds, made.op["d"].holds) == ((), ("a",), ("a",))


@pytest.mark.parametrize(
    "old, new",
    [
        ("c = aten.mm.default(b)  # f32[25] | makes c:100", "c = aten.mm.default(b)  # f32[26] | makes c:104"),
        ("c = aten.mm.default(b)  # f32[25]", "c = aten.mm.default(b)  # i32[25]"),
        ("c = aten.mm.default(b)", "c = aten.mm.default(b, a)"),
        ("b = aten.gelu.default(a)", "b = memgraph_oss.piece.default(a)"),
        ("a = aten.mm.default(x)", "a = memgraph.opaque(x)"),
        ("b = aten.gelu.default(a)", "b = memgraph.accumulate(a)"),
        ("b = aten.gelu.default(a)", "b = memgraph.offload.default(a)"),
        ("return output e", "return output a, output e"),
        ("f = aten.mul.Tensor(t, e)", "f = aten.mul.Tensor(t, a)"),
    ],
)
def test_others_do_not(old: str, new: str) -> None:
    text = STEP.replace(old, new)
    assert text != STEP
    assert _reused(text).get("c") != "a"


def test_a_tuple_gives_no_memory() -> None:
    """Its op may have one storage, where the other items are None: the backward of a layer norm without parameters."""
    text = STEP.replace(
        "a = aten.mm.default(x)  # f32[25] | makes a:100", "a = aten.f.default(x)  # f32[25] | makes a.0:100"
    )
    text = text.replace("b = aten", "i = getitem(a)  # f32[25] | holds a.0\nb = aten").replace(
        "gelu.default(a)", "gelu.default(i)"
    )
    assert _reused(text) == {}


def test_small_results_have_their_own_memory() -> None:
    assert _reused(STEP, smallest=101) == {}


def test_memory_is_not_kept_where_the_peak_would_rise() -> None:
    peak = "z = aten.mm.default(b)  # f32[100] | makes z:400\ny = aten.sum.default(z)  # f32[] | makes y:4\n"
    assert _reused(STEP.replace("c = ", peak + "c = ")) == {}


@given(planned())
def test_no_peak_rises_and_no_op_writes_over_a_live_value(both: tuple[Trace, Plan]) -> None:
    trace, plan = both
    planned_trace = apply(trace, plan)
    forecast = predict(planned_trace, Machine(0))
    reused = reused_buffers(forecast, {op.name for op in planned_trace.ops}, 1)
    after = predict(with_buffer_reuse(planned_trace, reused), Machine(0))
    boundary = planned_trace.boundary
    for half in (slice(0, boundary), slice(boundary, None)):
        assert max(after.total[half], default=0) <= max(forecast.total[half], default=0)
    lives = {op.name: (first, last) for op, _, first, last in spans(planned_trace) if len(op.makes) == 1}
    for op, value in reused.items():
        first, last = lives[value]
        assert first <= last < planned_trace.index[op]
        assert planned_trace.op[value].nbytes == planned_trace.op[op].nbytes
    assert len(set(reused.values())) == len(reused)  # a value gives its memory once
