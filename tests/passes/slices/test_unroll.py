"""A slice carried out: lines for each part, room for what is read whole, sums in place; the step computes the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import Machine, Trace, check, parse, predict
from passes.slices.chain import find_chains
from passes.slices.hoist import can_hoist
from passes.slices.parts import Origin
from passes.slices.slice import parse_slice
from passes.slices.unroll import unroll
from tests.support.layered_traces import lines
from tests.support.row_traces import HEAD, facts_of, row_steps, run, same, wide_values

FORWARD = parse("""
    forward:
    x = input()  # f32[8, 4] | makes x:128
    w = parameter()  # f32[4, 16] | makes w:256
    a = aten.mm.default(x, w)  # f32[8, 16] | makes a:512 | 16.0 us
    b = relu(a)  # f32[8, 16] | makes b:512 | 8.0 us
    w_t = t(w)  # f32[16, 4] | holds w
    c = aten.mm.default(b, w_t)  # f32[8, 4] | makes c:128 | 16.0 us
    l = total(b)  # f32[] | makes l:4
    return output c, output l
""")
ROWS = parse_slice("slice 8 rows in 2 parts: a[0:1<0:1,-] b[0:1<0:1] c[0:1<0:1,-] l[+<0:1]")
ROWS_OF_HEAD = parse_slice(
    "slice 8 rows in 2 parts: a[0:1<0:1,-] b[0:1<0:1] c[0:1<0:1,0:1] l[+<0:1] d[0:1<-,0:1] e[0:1<0:1,0:1] "
    "dh[0:1<0:1,-] dw[+<1:2,0:1]"
)


def test_each_op_is_there_once_for_each_part() -> None:
    assert_expected_inline(
        lines(unroll(FORWARD, ROWS).trace),
        """\
w_t = t(w)
c__parts = aten.empty_strided.default()
x__0_1__p1 = aten.slice.Tensor(x)
a__p1 = aten.mm.default(x__0_1__p1, w)
b__p1 = relu(a__p1)
c__p1 = aten.mm.default(b__p1, w_t)
c__at1 = aten.slice.Tensor(c__parts)
c__write1 = aten.copy_.default(c__at1, c__p1)
l__parts = total(b__p1)
x__0_1__p2 = aten.slice.Tensor(x)
a__p2 = aten.mm.default(x__0_1__p2, w)
b__p2 = relu(a__p2)
c__p2 = aten.mm.default(b__p2, w_t)
c__at2 = aten.slice.Tensor(c__parts)
c__write2 = aten.copy_.default(c__at2, c__p2)
l__p2 = total(b__p2)
l__add2 = aten.add_.Tensor(l__parts, l__p2)
c = aten.alias.default(c__parts)
l = aten.alias.default(l__parts)
""",
    )


def test_a_part_says_what_it_takes() -> None:
    trace = unroll(FORWARD, replace(ROWS, parts=3)).trace
    assert_expected_inline(
        "\n".join(
            str(trace.op[name]) for name in ("x__0_1__p3", "a__p1", "a__p3", "c__at3", "c__write3", "c", "l__p2")
        ),
        """\
x__0_1__p3 = aten.slice.Tensor(x)  # f32[3, 4] | holds x
a__p1 = aten.mm.default(x__0_1__p1, w)  # f32[2, 16] | makes a__p1:128 | 4.0 us
a__p3 = aten.mm.default(x__0_1__p3, w)  # f32[3, 16] | makes a__p3:192 | 6.0 us
c__at3 = aten.slice.Tensor(c__parts)  # f32[3, 4] | holds c__parts | once
c__write3 = aten.copy_.default(c__at3, c__p3)  # f32[3, 4] | holds c__parts | once
c = aten.alias.default(c__parts)  # f32[8, 4] | holds c__parts
l__p2 = total(b__p2)  # f32[] | makes l__p2:4""",
    )


def test_parts_are_rounded_up_as_the_allocator_does() -> None:
    trace = unroll(FORWARD, replace(ROWS, parts=3), unit=64).trace
    assert [trace.op[name].nbytes for name in ("a__p1", "a__p3", "c__p1", "c__parts", "l__parts")] == [
        128,
        192,
        64,
        128,
        4,
    ]


def test_backward_ops_run_in_forward_and_results_are_scaled_in_backward() -> None:
    assert_expected_inline(
        lines(unroll(HEAD, ROWS_OF_HEAD).trace),
        """\
h = relu(x)
g__one = aten.ones.default()
w_t__one = t(w)
h_t__one = t(h)
dh__parts = aten.empty_strided.default()
h__0_1__p1 = aten.slice.Tensor(h)
a__p1 = aten.mm.default(h__0_1__p1, w)
b__p1 = square(a__p1)
y__0_1__p1 = aten.slice.Tensor(y)
c__p1 = add(b__p1, y__0_1__p1)
l__parts = total(c__p1)
d__p1 = scale(g__one, c__p1)
e__p1 = mul(d__p1, a__p1)
dh__p1 = aten.mm.default(e__p1, w_t__one)
dh__at1 = aten.slice.Tensor(dh__parts)
dh__write1 = aten.copy_.default(dh__at1, dh__p1)
h_t__one__1_2__p1 = aten.slice.Tensor(h_t__one)
dw__parts = aten.mm.default(h_t__one__1_2__p1, e__p1)
h__0_1__p2 = aten.slice.Tensor(h)
a__p2 = aten.mm.default(h__0_1__p2, w)
b__p2 = square(a__p2)
y__0_1__p2 = aten.slice.Tensor(y)
c__p2 = add(b__p2, y__0_1__p2)
l__p2 = total(c__p2)
l__add2 = aten.add_.Tensor(l__parts, l__p2)
d__p2 = scale(g__one, c__p2)
e__p2 = mul(d__p2, a__p2)
dh__p2 = aten.mm.default(e__p2, w_t__one)
dh__at2 = aten.slice.Tensor(dh__parts)
dh__write2 = aten.copy_.default(dh__at2, dh__p2)
h_t__one__1_2__p2 = aten.slice.Tensor(h_t__one)
dw__p2 = aten.addmm_.default(dw__parts, h_t__one__1_2__p2, e__p2)
l = aten.alias.default(l__parts)
dh = memgraph_slices.scale_.default(dh__parts, g)
dw = memgraph_slices.scale_.default(dw__parts, g)
dx = mul(dh, x)
""",
    )


def test_an_added_line_has_the_origin_that_the_graph_needs() -> None:
    found = unroll(HEAD, ROWS_OF_HEAD)
    assert {name: found.origins[name] for name in ("h__0_1__p2", "dh__at1")} == {
        "h__0_1__p2": Origin("h", "rows", (0, 4, 8)),
        "dh__at1": Origin("dh__parts", "rows", (0, 0, 4)),
    }
    assert {name: (origin.source, origin.kind) for name, origin in found.origins.items() if not origin.view} == {
        "g__one": ("g", "one"),
        "w_t__one": ("w_t", "copy"),
        "h_t__one": ("h_t", "copy"),
        "dh__parts": ("dh", "room"),
        **{f"{name}__p{part}": (name, "part") for name in ("a", "b", "c", "d", "e", "dh") for part in (1, 2)},
        "dh__write1": ("dh", "write"),
        "dh__write2": ("dh", "write"),
        "l__parts": ("l", "sum"),
        "l__p2": ("l", "part"),
        "l__add2": ("l", "write"),
        "l": ("l", "whole"),
        "dw__parts": ("dw", "sum"),
        "dw__p2": ("dw", "write"),
        "dh": ("dh", "scale"),
        "dw": ("dw", "scale"),
    }
    assert {op.name for op in found.trace.ops} - found.origins.keys() == {"x", "y", "w", "g", "h", "dx"}


def test_what_is_written_in_place_may_run_once() -> None:
    trace = unroll(HEAD, ROWS_OF_HEAD).trace
    assert_expected_inline(
        " ".join(op.name for op in trace.ops if op.once),
        """dh__parts l__parts dh__at1 dh__write1 dw__parts l__add2 dh__at2 dh__write2 dw__p2 dh dw""",
    )


def test_rows_of_sequences_are_views_of_both_dimensions() -> None:
    trace = parse("""
        forward:
        x = input()  # f32[2, 3, 4] | makes x:96
        a = relu(x)  # f32[2, 3, 4] | makes a:96
        b = neg(a)  # f32[2, 3, 4] | makes b:96
        return output b
    """)
    cut = parse_slice("slice 6 rows of 3 in 4 parts: a[0:2<0:2] b[0:2<0:2]")
    found = unroll(trace, cut)
    views = {name: origin.view for name, origin in found.origins.items() if name.startswith("x__0_2__p")}
    assert views == {
        "x__0_2__p1_0": (0, 0, 1), "x__0_2__p1": (1, 0, 1),  # of the first sequence
        "x__0_2__p2_0": (0, 0, 1), "x__0_2__p2": (1, 1, 3),
        "x__0_2__p3_0": (0, 1, 2), "x__0_2__p3": (1, 0, 1),
        "x__0_2__p4_0": (0, 1, 2), "x__0_2__p4": (1, 1, 3),
    }  # fmt: skip
    assert_expected_inline(
        "\n".join(line for line in lines(found.trace).splitlines() if "3" in line),
        """\
x__0_2__p3_0 = aten.slice.Tensor(x)
x__0_2__p3 = aten.slice.Tensor(x__0_2__p3_0)
a__p3 = relu(x__0_2__p3)
b__p3 = neg(a__p3)
b__at3_0 = aten.slice.Tensor(b__parts)
b__at3 = aten.slice.Tensor(b__at3_0)
b__write3 = aten.copy_.default(b__at3, b__p3)""",
    )
    assert same(run(trace), run(found.trace, found.origins))


def test_a_view_of_a_result_holds_its_new_storage() -> None:
    trace = parse("""
        forward:
        x = input()  # f32[8, 4] | makes x:128
        a = relu(x)  # f32[8, 4] | makes a:128
        v = t(a)  # f32[4, 8] | holds a
        u = t(v)  # f32[8, 4] | holds a
        return output u
    """)
    cut = parse_slice("slice 8 rows in 2 parts: a[0:1<0:1] v[1:2<0:1]")
    found = unroll(trace, cut)
    check(found.trace)
    assert found.trace.op["v"].holds == found.trace.op["u"].holds == ("v__parts",) and "a" not in found.trace.op
    assert same(run(trace), run(found.trace, found.origins))


@pytest.mark.parametrize("text", ["slice 8 rows in 2 parts: z[0:1<0:1]", "slice 8 rows in 2 parts: a[0:1<0:1]"])
def test_a_slice_of_another_step_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"the trace has no op '[az]' that reads 1 values, as slice 8 rows"):
        unroll(FORWARD, parse_slice(text))


def test_ops_that_draw_random_numbers_stay_in_their_order() -> None:
    """u is behind the chain, and v before it."""
    trace = parse("""
        forward:
        x = input()  # f32[8, 4] | makes x:128
        a = relu(x)  # f32[8, 4] | makes a:128
        u = dropout(a)  # f32[8, 4] | makes u:128 | draws 16
        v = dropout(x)  # f32[8, 4] | makes v:128 | draws 16
        b = mul(a, v)  # f32[8, 4] | makes b:128
        return output u, output b
    """)
    cut = parse_slice("slice 8 rows in 2 parts: a[0:1<0:1] b[0:1<0:1,0:1]")
    with pytest.raises(ValueError, match="u changes or reads the generator, and would run behind ops that follow it"):
        unroll(trace, cut)
    quiet = replace(trace, ops=tuple(replace(op, draws=0) for op in trace.ops))
    assert [op.name for op in unroll(quiet, cut).trace.ops if op.fn == "dropout"] == ["v", "u"]


def test_a_write_stays_behind_the_reads_before_it() -> None:
    """n, which changes the buffer m, is behind the chain; b reads what it has changed."""
    trace = parse("""
        forward:
        m = buffer()  # f32[8, 4] | makes m:128
        x = input()  # f32[8, 4] | makes x:128
        a = relu(x)  # f32[8, 4] | makes a:128
        n = copy_(m, x)  # f32[8, 4] | holds m | once
        b = mul(a, m)  # f32[8, 4] | makes b:128 | once
        return output b
    """)
    with pytest.raises(ValueError, match="m in place"):
        unroll(trace, parse_slice("slice 8 rows in 2 parts: a[0:1<0:1] b[0:1<0:1,0:1]"))


@pytest.mark.parametrize("nbytes", [32, 128])
def test_backward_reads_rows_of_what_forward_has_kept(nbytes: int) -> None:
    """a is large, and runs again; k is kept if it is small, and not if it has a fourth of the bytes of a."""
    trace = parse(f"""
        forward:
        x = input()  # f32[8, 4] | makes x:128
        w = parameter()  # f32[4, 16] | makes w:256
        g = tangent()  # f32[] | makes g:4
        a = aten.mm.default(x, w)  # f32[8, 16] | makes a:512
        k = across(a)  # f32[8, 1] | makes k:{nbytes}
        l = total(k)  # f32[] | makes l:4
        backward:
        s = scale(g, a)  # f32[8, 16] | makes s:512
        b = plus(s, a)  # f32[8, 16] | makes b:512
        c = by(b, k)  # f32[8, 16] | makes c:512
        w_t = t(w)  # f32[16, 4] | holds w
        d = aten.mm.default(c, w_t)  # f32[8, 4] | makes d:128
        return output l, input_gradient d
    """)
    cut = next(cut for cut in find_chains(trace, facts_of(trace), "a", 2) if cut.rule["a"].makes == (0, 1))
    found = unroll(trace, cut)
    check(found.trace)
    assert cut.reruns == 128 and "a__r1" in found.trace.op and ("k__r1" in found.trace.op) == (nbytes == 128)
    if nbytes == 32:
        assert str(found.trace.op["k__0_1__r2"]) == "k__0_1__r2 = aten.slice.Tensor(k)  # f32[4, 1] | holds k__parts"
    assert same(run(trace), run(found.trace, found.origins))


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(trace=row_steps(), parts=st.sampled_from((2, 3, 5, 8)), data=st.data())
def test_a_step_in_a_slice_computes_the_same(trace: Trace, parts: int, data: st.DataObject) -> None:
    """Whatever the seed is."""
    facts, expected = facts_of(trace), run(trace)
    seed = data.draw(st.sampled_from(wide_values(trace)))
    for cut in find_chains(trace, facts, seed, parts):
        assert cut.reruns or can_hoist(trace, cut.rule, facts)
        found = unroll(trace, cut)
        check(found.trace)
        assert same(run(found.trace, found.origins), expected), str(found.trace)
        assert predict(found.trace, Machine(0)).us <= predict(trace, Machine(0)).us * 2
        whole = {op.name for op in found.trace.ops if op.type == "f32[8, 16]" and op.makes}
        assert whole.isdisjoint(cut.rule)  # those that others read are aliases of their rows
