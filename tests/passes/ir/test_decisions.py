"""A decision defines a value again, and the step computes the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from passes import Offload, Op, Plan, Recompute, Reload, Stream, Trace, apply, check, parse, parse_plan
from tests.support.interpreter import run
from tests.support.strategies import planned, traces

STEP = parse("""
    forward:
    w = parameter()  # makes w:64
    x = input()  # makes x:128
    d = tangent()  # makes d:128
    a = relu(x)  # f32[8, 4] | makes a:128 | 10.0 us | at model.py:1
    v = view(a)  # f32[32] | holds a
    b = mm(v, w)  # makes b:128
    backward:
    e = mm_backward(d, v)  # makes e:64
    f = relu_backward(e, a)  # makes f:128
    return output b, gradient f
""")
RANDOM = parse("""
    forward:
    x = input()  # makes x:100
    d = tangent()  # makes d:100
    n = dropout(x)  # makes n.0:100, n.1:25 | draws 16
    y = getitem(n)  # u8[100] | holds n.0
    m = getitem(n)  # u8[25] | holds n.1
    z = noise(y)  # makes z:100 | draws 16
    backward:
    g = dropout_backward(d, y, m)  # makes g:100
    return output z, gradient g
""")


def changed(trace: Trace, plan: Plan) -> str:
    """The lines of what `plan` makes of `trace`, without inputs and outputs."""
    applied = apply(trace, plan)
    check(applied)
    assert run(applied).handed == run(trace).handed
    return str(replace(applied, ops=tuple(op for op in applied.ops if not op.is_input))).rpartition("return ")[0]


def test_no_decisions_change_nothing() -> None:
    assert apply(STEP, ()) == STEP


def test_later_reads_mean_the_recomputed_copy() -> None:
    assert_expected_inline(
        changed(STEP, (Recompute("a", before="f"),)),
        """\
forward:
a = relu(x)  # f32[8, 4] | makes a:128 | 10.0 us | at model.py:1
v = view(a)  # f32[32] | holds a
b = mm(v, w)  # makes b:128
backward:
e = mm_backward(d, v)  # makes e:64
a__1 = relu(x)  # f32[8, 4] | makes a__1:128 | 10.0 us | recomputes a | at model.py:1
f = relu_backward(e, a__1)  # makes f:128
""",
    )


def test_a_recomputed_view_holds_the_newest_copy_of_its_base() -> None:
    assert_expected_inline(
        changed(STEP, (Recompute("a", before="e"), Recompute("v", before="e"))),
        """\
forward:
a = relu(x)  # f32[8, 4] | makes a:128 | 10.0 us | at model.py:1
v = view(a)  # f32[32] | holds a
b = mm(v, w)  # makes b:128
backward:
a__1 = relu(x)  # f32[8, 4] | makes a__1:128 | 10.0 us | recomputes a | at model.py:1
v__1 = view(a__1)  # f32[32] | holds a__1 | recomputes v
e = mm_backward(d, v__1)  # makes e:64
f = relu_backward(e, a__1)  # makes f:128
""",
    )


def test_a_view_of_a_view_follows_what_its_base_now_is() -> None:
    step = parse("""
        forward:
        x = input()  # makes x:8
        a = f(x)  # makes a:8
        backward:
        t = view(a)  # holds a
        u = view(t)  # holds a
        g = f(u)  # makes g:8
        return gradient g
    """)
    assert_expected_inline(
        changed(step, (Recompute("a", before="t"),)),
        """\
forward:
a = f(x)  # makes a:8
backward:
a__1 = f(x)  # makes a__1:8 | recomputes a
t = view(a__1)  # holds a__1
u = view(t)  # holds a__1
g = f(u)  # makes g:8
""",
    )


def test_a_value_can_be_recomputed_for_each_use() -> None:
    plan = (Recompute("a", before="e"), Recompute("v", before="e"), Recompute("a", before="f"))
    assert_expected_inline(
        changed(STEP, plan),
        """\
forward:
a = relu(x)  # f32[8, 4] | makes a:128 | 10.0 us | at model.py:1
v = view(a)  # f32[32] | holds a
b = mm(v, w)  # makes b:128
backward:
a__1 = relu(x)  # f32[8, 4] | makes a__1:128 | 10.0 us | recomputes a | at model.py:1
v__1 = view(a__1)  # f32[32] | holds a__1 | recomputes v
e = mm_backward(d, v__1)  # makes e:64
a__2 = relu(x)  # f32[8, 4] | makes a__2:128 | 10.0 us | recomputes a | at model.py:1
f = relu_backward(e, a__2)  # makes f:128
""",
    )


def test_an_offload_leaves_and_comes_back_at_four_places() -> None:
    plan = (Offload("a", out="v", free="b"), Reload("a", back="e", use="f"), Recompute("v", before="f"))
    unread = Op("e", "mm_backward", ("d",), STEP.op["e"].makes, ("e",), "backward")
    step = replace(STEP, ops=tuple(unread if op.name == "e" else op for op in STEP.ops))
    assert_expected_inline(
        changed(step, plan),
        """\
forward:
a = relu(x)  # f32[8, 4] | makes a:128 | 10.0 us | at model.py:1
v = view(a)  # f32[32] | holds a
a__out = memgraph.offload.default(a)  # f32[0] | makes a__out:0
b = mm(v, w)  # makes b:128
a__free = memgraph.free.default(a__out, a)
backward:
a__in_1 = memgraph.reload.default(a__out)  # f32[8, 4] | makes a__in_1:128 | at model.py:1
e = mm_backward(d)  # makes e:64
a__back_1 = memgraph.wait.default(a__in_1)  # f32[8, 4] | holds a__in_1 | at model.py:1
v__1 = view(a__back_1)  # f32[32] | holds a__in_1 | recomputes v
f = relu_backward(e, a__back_1)  # makes f:128
""",
    )


def test_what_is_cast_for_its_way_comes_back_wide_but_rounded() -> None:
    """Its own bytes go with the cast, those of the narrow copy when they have left; only f is given what was rounded."""
    plan = (Offload("a", out="v", free="b", wire="bf16"), Reload("a", back="e", use="f"), Recompute("v", before="f"))
    unread = Op("e", "mm_backward", ("d",), STEP.op["e"].makes, ("e",), "backward")
    step = replace(STEP, ops=tuple(unread if op.name == "e" else op for op in STEP.ops))
    assert_expected_inline(
        changed(step, plan),
        """\
forward:
a = relu(x)  # f32[8, 4] | makes a:128 | 10.0 us | at model.py:1
v = view(a)  # f32[32] | holds a
a__wire = memgraph.narrow.default(a)  # bf16[8, 4] | makes a__wire:64 | workspace 16384 | at model.py:1
a__out = memgraph.offload.default(a__wire)  # bf16[0] | makes a__out:0
b = mm(v, w)  # makes b:128
a__free = memgraph.free.default(a__out, a__wire)
backward:
a__in_1 = memgraph.reload.default(a__out)  # bf16[8, 4] | makes a__in_1:64 | at model.py:1
e = mm_backward(d)  # makes e:64
a__back_1 = memgraph.wait.default(a__in_1)  # bf16[8, 4] | holds a__in_1 | at model.py:1
a__wide_1 = memgraph.widen.default(a__back_1)  # f32[8, 4] | makes a__wide_1:128 | at model.py:1
v__1 = view(a__wide_1)  # f32[32] | holds a__wide_1 | recomputes v
f = relu_backward(e, a__wide_1)  # makes f:128
""",
    )


def test_only_what_a_type_may_stand_for_is_cast() -> None:
    for type in ("f64[8, 2]", "bf16[8, 8]", "i32[8, 4]", "c64[8, 2]", "f32[4], f32[4]", ""):
        step = replace(STEP, ops=tuple(replace(op, type=type) if op.name == "a" else op for op in STEP.ops))
        with pytest.raises(ValueError, match="can't be cast to 'bf16'"):
            apply(step, (Offload("a", "a", "b", "bf16"),))
    with pytest.raises(ValueError, match="can't be cast to 'f16'"):
        apply(STEP, (Offload("a", "a", "b", "f16"),))


def test_an_offloaded_value_can_be_reloaded_for_each_use() -> None:
    plan = (
        Offload("a", out="b", free="b"), Reload("a", back="e", use="e"), Recompute("v", before="e"), Reload("a", back="f", use="f"),
    )  # fmt: skip
    assert_expected_inline(
        changed(STEP, plan),
        """\
forward:
a = relu(x)  # f32[8, 4] | makes a:128 | 10.0 us | at model.py:1
v = view(a)  # f32[32] | holds a
b = mm(v, w)  # makes b:128
a__out = memgraph.offload.default(a)  # f32[0] | makes a__out:0
a__free = memgraph.free.default(a__out, a)
backward:
a__in_1 = memgraph.reload.default(a__out)  # f32[8, 4] | makes a__in_1:128 | at model.py:1
a__back_1 = memgraph.wait.default(a__in_1)  # f32[8, 4] | holds a__in_1 | at model.py:1
v__1 = view(a__back_1)  # f32[32] | holds a__in_1 | recomputes v
e = mm_backward(d, v__1)  # makes e:64
a__in_2 = memgraph.reload.default(a__out)  # f32[8, 4] | makes a__in_2:128 | at model.py:1
a__back_2 = memgraph.wait.default(a__in_2)  # f32[8, 4] | holds a__in_2 | at model.py:1
f = relu_backward(e, a__back_2)  # makes f:128
""",
    )


def test_the_newest_copy_is_offloaded() -> None:
    plan = (
        Recompute("a", before="b"), Recompute("v", before="b"), Offload("a", out="b", free="b"), Reload("a", back="e", use="e"),
        Recompute("v", before="e"),
    )  # fmt: skip
    assert_expected_inline(
        changed(STEP, plan),
        """\
forward:
a = relu(x)  # f32[8, 4] | makes a:128 | 10.0 us | at model.py:1
v = view(a)  # f32[32] | holds a
a__1 = relu(x)  # f32[8, 4] | makes a__1:128 | 10.0 us | recomputes a | at model.py:1
v__1 = view(a__1)  # f32[32] | holds a__1 | recomputes v
b = mm(v__1, w)  # makes b:128
a__out = memgraph.offload.default(a__1)  # f32[0] | makes a__out:0
a__free = memgraph.free.default(a__out, a__1)
backward:
a__in_1 = memgraph.reload.default(a__out)  # f32[8, 4] | makes a__in_1:128 | at model.py:1
a__back_1 = memgraph.wait.default(a__in_1)  # f32[8, 4] | holds a__in_1 | at model.py:1
v__2 = view(a__back_1)  # f32[32] | holds a__in_1 | recomputes v
e = mm_backward(d, v__2)  # makes e:64
f = relu_backward(e, a__back_1)  # makes f:128
""",
    )


def test_random_numbers_are_recomputed_from_the_state_of_their_first_run() -> None:
    plan = (Recompute("n", before="g"), Recompute("y", before="g"), Recompute("m", before="g"))
    assert_expected_inline(
        changed(RANDOM, plan),
        """\
forward:
n__rng = memgraph.rng_state.default()  # u8[16] | makes n__rng:16
n = dropout(x)  # makes n.0:100, n.1:25 | draws 16
y = getitem(n)  # u8[100] | holds n.0
m = getitem(n)  # u8[25] | holds n.1
z = noise(y)  # makes z:100 | draws 16
backward:
n__1__swap = memgraph.swap_rng.default(n__rng)  # u8[16] | makes n__1__swap:16
n__1 = dropout(x)  # makes n__1.0:100, n__1.1:25 | draws 16 | recomputes n
n__1__back = memgraph.swap_rng.default(n__1__swap)  # u8[16] | makes n__1__back:16
y__1 = getitem(n__1)  # u8[100] | holds n__1.0 | recomputes y
m__1 = getitem(n__1)  # u8[25] | holds n__1.1 | recomputes m
g = dropout_backward(d, y__1, m__1)  # makes g:100
""",
    )


def test_the_state_is_noted_once_however_often_it_is_used() -> None:
    applied = apply(RANDOM, (Recompute("z", before="g"), Recompute("z", before="g")))
    assert [op.fn for op in applied.ops].count("memgraph.rng_state.default") == 1
    assert [op.fn for op in applied.ops].count("memgraph.swap_rng.default") == 4


def test_decisions_of_one_place_stand_in_the_order_of_the_plan() -> None:
    step = parse("forward:\na = f()  # makes a:1\nb = g(a)  # makes b:1\nbackward:\nc = h(a, b)\nreturn output c")
    there, back = Recompute("a", before="c"), Recompute("b", before="c")
    assert apply(step, (there, back)).op["b__1"].reads == ("a__1",)
    assert apply(step, (back, there)).op["b__1"].reads == ("a",)


@pytest.mark.parametrize(
    ("decision", "unknown"),
    [
        (Recompute("q", before="f"), "q"),
        (Recompute("a", before="q"), "q"),
        (Offload("q", out="a", free="b"), "q"),
        (Offload("a", out="q", free="b"), "q"),
        (Offload("a", out="a", free="q"), "q"),
        (Reload("a", back="", use="f"), ""),
        (Reload("a", back="f", use="a__1"), "a__1"),
    ],
)
def test_a_decision_about_an_unknown_op_is_refused(decision: Recompute | Offload | Reload, unknown: str) -> None:
    with pytest.raises(ValueError) as raised:
        apply(STEP, (Recompute("a", before="f"), decision))
    assert str(raised.value) == f"{decision}: the trace has no op {unknown!r}"


PLAN = """\
recompute a: before f
offload a: out v, free b
offload b: out e, free f, wire bf16
reload a: back e, use f"""


def test_a_plan_prints_as_it_was_read() -> None:
    plan = parse_plan(PLAN)
    there = Offload("a", "v", "b"), Offload("b", "e", "f", "bf16")
    assert plan == (Recompute("a", "f"), *there, Reload("a", "e", "f"))
    assert "\n".join(map(str, plan)) == PLAN
    assert parse_plan("") == parse_plan(" \n\n") == ()
    assert parse_plan(PLAN.replace("\n", "\n\n  ")) == plan


@pytest.mark.parametrize(
    "line",
    [
        "recompute a",
        "recompute a:",
        "recompute a: after f",
        "keep a: before f",
        "offload a: out v",
        "offload a: free b, out v",
        "offload a: out v, free b, wire",
        "offload a: out v, wire bf16, free b",
        "reload a: back e, use f, wire bf16",
        "recompute a: before f, junk",
        "?",
        "a = f()",
    ],
)
def test_what_is_no_decision_is_shown_beside_one(line: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_plan(f"recompute a: before f\n{line}\n")
    assert str(raised.value) == f"not a decision: {line!r}\nwrite e.g.: recompute relu_1: before mm_4"


names = st.text("ab_1.", min_size=1, max_size=9)
decisions = (
    st.builds(Recompute, names, names)
    | st.builds(Offload, names, names, names, names | st.just(""))
    | st.builds(Reload, names, names, names)
)


@given(st.lists(decisions))
def test_any_plan_is_read_back(plan: list[Recompute | Offload | Reload]) -> None:
    assert parse_plan("\n".join(map(str, plan))) == tuple(plan)


@given(planned())
def test_every_invariant_holds_of_what_a_plan_makes(both: tuple[Trace, Plan]) -> None:
    check(apply(*both))


@given(planned())
def test_a_plan_never_changes_what_is_computed(both: tuple[Trace, Plan]) -> None:
    """Every op of the step, its outputs, and the generator behind it; each copy is what the first was."""
    trace, plan = both
    plain, decided = run(trace), run(apply(trace, plan))
    assert decided.computed == plain.computed
    assert decided.handed == plain.handed
    assert decided.generator == plain.generator


@given(planned())
def test_the_ops_of_the_step_stay_as_they_are_and_in_their_order(both: tuple[Trace, Plan]) -> None:
    trace, plan = both
    applied = apply(trace, plan)
    kept = [op for op in applied.ops if op.name in trace.op]
    far = {decision.value for decision in plan if isinstance(decision, Stream)}
    assert {op.name for op in kept if op.offloaded} == far
    bare = [replace(op, reads=(), holds=()) for op in kept]
    assert [op for op in bare if not op.offloaded] == [
        replace(op, reads=(), holds=()) for op in trace.ops if op.name not in far
    ]
    assert [(kind, value.removesuffix("__out")) for kind, value in applied.outputs] == list(trace.outputs)
    added = [op for op in applied.ops if op.name not in trace.op]
    assert all(op.recomputes or op.fn.startswith("memgraph.") for op in added)
    assert all(replace(trace.op[op.recomputes], **same(op)) == op for op in added if op.recomputes)


@given(traces())
def test_no_decisions_never_change_anything(trace: Trace) -> None:
    assert apply(trace, ()) == trace


def same(op: Op) -> dict[str, Any]:
    """Return what a recomputed op may have different from the first one."""
    return {name: getattr(op, name) for name in ("name", "reads", "makes", "holds", "phase", "recomputes")}
