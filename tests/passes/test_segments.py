"""Neighbouring lines as one: text in, text out."""

from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline

from passes import Machine, Op, parse, predict
from passes.segments import (
    Price,
    affordable_segments,
    faster_regions,
    find_regions,
    find_segments,
    fuse_segments,
    outside_of,
    over_budget,
    spread_segment_times,
)

NORMED = parse("""\
forward:
x = input()  # f32[8] | makes x:32
w = parameter()  # f32[8] | makes w:32
r = aten.mm.default(x, w)  # f32[8] | makes r:32 | 9.0 us
y = aten.add.Tensor(x, r)  # f32[8] | makes y:32 | 4.0 us
n = aten.native_layer_norm.default(y, w)  # f32[8], f32[1] | makes n.0:32, n.1:4 | 6.0 us | workspace 8
n_0 = getitem(n)  # f32[8] | holds n.0
n_1 = getitem(n)  # f32[1] | holds n.1
g = aten.gelu.default(n_0)  # f32[8] | makes g:32 | 5.0 us
v = aten.view.default(g)  # f32[2, 4] | holds g
z = aten.view.default(x)  # f32[2, 4] | holds x
m = aten.mm.default(v, w)  # f32[2, 4] | makes m:32 | 9.0 us
backward:
a = aten.mul.Tensor(m, z)  # f32[2, 4] | makes a:32 | 3.0 us
b = aten.mul.Tensor(a, n_1)  # f32[2, 4] | makes b:32 | 3.0 us
c = aten.add.Tensor(b, y)  # f32[2, 4] | makes c:32 | 3.0 us
return output m, gradient c
""")
FUSIBLE = ("add", "mul", "gelu", "native_layer_norm")


def fusible(op: Op) -> bool:
    return op.fn.split(".")[1] in FUSIBLE


def test_a_run_is_one_line_and_gives_what_others_want() -> None:
    found = find_segments(NORMED, fusible)
    text = str(fuse_segments(NORMED, found, {each.name: Price(7.0, 64) for each in found}))
    assert_expected_inline(
        text,
        """\
forward:
x = input()  # f32[8] | makes x:32
w = parameter()  # f32[8] | makes w:32
r = aten.mm.default(x, w)  # f32[8] | makes r:32 | 9.0 us
y_segment = memgraph.segment(x, r, w)  # f32[8], f32[1], f32[8] | makes y_segment.0:32, y_segment.1:4, y_segment.2:32 | 7.0 us | workspace 64
y = getitem(y_segment)  # f32[8] | holds y_segment.0
n_1 = getitem(y_segment)  # f32[1] | holds y_segment.1
g = getitem(y_segment)  # f32[8] | holds y_segment.2
v = aten.view.default(g)  # f32[2, 4] | holds y_segment.2
z = aten.view.default(x)  # f32[2, 4] | holds x
m = aten.mm.default(v, w)  # f32[2, 4] | makes m:32 | 9.0 us
backward:
a_segment = memgraph.segment(m, z, n_1, y)  # f32[2, 4] | makes a_segment.0:32 | 7.0 us | workspace 64
c = getitem(a_segment)  # f32[2, 4] | holds a_segment.0
return output m, gradient c
""",
    )
    assert str(parse(text)) == text


def test_a_segment_is_taken_if_it_is_faster() -> None:
    found = find_segments(NORMED, fusible)
    prices = {found[0].name: Price(16.0), found[1].name: Price(8.0)}
    assert affordable_segments(NORMED, Machine(1 << 20), found, prices) == (found[1],)


def test_a_segment_whose_line_is_over_the_budget_is_not_taken() -> None:
    found = find_segments(NORMED, fusible)
    peak = predict(NORMED, Machine(1 << 20)).peak
    heavy = {found[0].name: Price(1.0, peak), found[1].name: Price(1.0)}
    assert affordable_segments(NORMED, Machine(peak), found, heavy) == (found[1],)


def test_ops_share_what_their_segment_takes() -> None:
    found = find_segments(NORMED, fusible)
    priced = spread_segment_times(NORMED, found, {found[0].name: Price(3.0), found[1].name: Price(99.0)})
    assert [priced.op[name].us for name in ("y", "n", "g", "a", "b")] == [0.8, 1.2, 1.0, 3.0, 3.0]


def test_a_value_that_is_several_is_not_cut() -> None:
    late = parse(
        str(NORMED)
        .replace("n_1 = getitem(n)  # f32[1] | holds n.1\n", "")
        .replace("a = aten.mul", "n_1 = getitem(n)  # f32[1] | holds n.1\na = aten.mul", 1)
    )
    assert [each.ops for each in find_segments(late, fusible)] == [("a", "b", "c")]


def test_ops_that_run_once_or_draw_are_in_no_segment() -> None:
    once = parse(str(NORMED).replace("| 4.0 us", "| 4.0 us | once").replace("| 5.0 us", "| 5.0 us | draws 16"))
    assert [each.ops for each in find_segments(once, fusible)] == [("a", "b", "c")]


def test_segments_are_not_endless() -> None:
    lines = "".join(f"x{i + 1} = aten.add.Tensor(x{i})  # f32[8] | makes x{i + 1}:32 | 1.0 us\n" for i in range(150))
    long = parse(f"forward:\nx0 = input()  # f32[8] | makes x0:32\n{lines}return output x150\n")
    assert [len(each.ops) for each in find_segments(long, fusible)] == [64, 64, 22]


TRAINED = parse("""\
forward:
x = input()  # f32[8] | makes x:32
w = parameter()  # f32[8, 8] | makes w:256
a = aten.mm.default(x, w)  # f32[8] | makes a:32 | 9.0 us
b = aten.gelu.default(a)  # f32[8] | makes b:32 | 5.0 us
y = aten.mm.default(b, w)  # f32[8] | makes y:32 | 9.0 us
a__out = memgraph.offload.default(a)  # f32[0] | makes a__out:0
a__free = memgraph.free.default(a__out, a)
backward:
t = tangent()  # f32[8] | makes t:32
g = aten.mm.default(t, b)  # f32[8, 8] | makes g:256 | 9.0 us
d = aten.mm.default(t, w)  # f32[8] | makes d:32 | 9.0 us
a__in_1 = memgraph.reload.default(a__out)  # f32[8] | makes a__in_1:32
a__back_1 = memgraph.wait.default(a__in_1)  # f32[8] | holds a__in_1
e = aten.gelu_backward.default(d, a__back_1)  # f32[8] | makes e:32 | 5.0 us
h = aten.mm.default(e, x)  # f32[8, 8] | makes h:256 | 9.0 us
s = aten.add.Tensor(g, h)  # f32[8, 8] | makes s:256 | 4.0 us
return output y, gradient s
""")


def test_a_region_goes_from_one_memory_op_to_the_next_and_frees_what_ends_in_it() -> None:
    found = find_regions(TRAINED, lambda op: True)
    assert [(each.name, each.ops, each.reads, each.outputs, each.frees) for each in found] == [
        ("a_region", ("a", "b", "y"), ("x", "w"), ("a", "b", "y"), ()),
        ("g_region", ("g", "d"), ("t", "b", "w"), ("g", "d"), ("b",)),  # not the caller's tangent
        ("e_region", ("e", "h", "s"), ("d", "a__back_1", "x", "g"), ("s",), ("d", "a__back_1", "g")),
    ]


def test_a_region_that_frees_before_it_makes_takes_less_than_both() -> None:
    *_, last = find_regions(TRAINED, lambda op: True)
    fused = fuse_segments(TRAINED, [last], {last.name: Price(10.0, -256)})
    forecast, machine = predict(fused, Machine(1 << 20)), Machine(1 << 20)
    line = fused.index[last.name]
    live = predict(TRAINED, machine).total[TRAINED.index["a__back_1"]]
    assert forecast.total[line] == live + 256 - 256
    assert str(parse(str(fused))) == str(fused)


def test_regions_are_compared_with_their_ops_in_segments() -> None:
    first, *_ = find_regions(TRAINED, lambda op: True)
    alone = sum(TRAINED.op[name].us for name in first.ops)
    assert faster_regions(TRAINED, [first], [], {first.name: Price(alone - 1)}) == (first,)
    assert faster_regions(TRAINED, [first], [], {first.name: Price(alone)}) == ()
    small = replace(first, name="small", ops=("a", "b"), outputs=("a", "b"))
    prices = {first.name: Price(alone - 1), "small": Price(2.0)}
    assert faster_regions(TRAINED, [first], [small], prices) == ()
    assert outside_of([first], [small]) == () and outside_of([], [small]) == (small,)


def test_a_region_over_the_budget_says_by_how_much() -> None:
    first, *_ = find_regions(TRAINED, lambda op: True)
    peak = predict(fuse_segments(TRAINED, [first], {first.name: Price(1.0)}), Machine(1 << 20)).total
    line = fuse_segments(TRAINED, [first], {first.name: Price(1.0)}).index[first.name]
    machine = Machine(int(peak[line]) + 50)
    assert over_budget(TRAINED, machine, [first], {first.name: Price(1.0, 50)}) == {}
    assert over_budget(TRAINED, machine, [first], {first.name: Price(1.0, 60)}) == {first.name: 10}
