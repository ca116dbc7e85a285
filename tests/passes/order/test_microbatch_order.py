"""A step in parts runs section by section: what a section fetches serves all parts, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from passes import Link, Machine, Op, Reload, Storage, Streaming, Trace, check, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.order.microbatch_order import order_by_section, order_like
from passes.schedule.schedule import Placement, schedule
from tests.support.strategies import machines, traces

MACHINE = Machine(1000, link=Link(out=10.0, back=10.0, capacity=1 << 30), streaming=Streaming(enabled=True))
INPUTS = """
    forward:
    v = parameter()  # f32[25] | makes v:100
    w = parameter()  # f32[25] | makes w:100
    x = input()  # makes x:10
    d = tangent()  # makes d:8
"""
FORWARD = """
    h_{i} = mm(x, v)  # makes h_{i}:40 | 100.0 us | microbatch {i}
    a_{i} = relu(h_{i})  # makes a_{i}:4 | 10.0 us | microbatch {i}
    y_{i} = mm(a_{i}, w)  # makes y_{i}:4 | 100.0 us | microbatch {i}
"""
BACKWARD = """
    g_{i} = mm(d, w)  # makes g_{i}:4 | 100.0 us | microbatch {i}
    dw_{i} = mm(d, a_{i})  # makes dw_{i}:100 | 100.0 us | microbatch {i}
    dh_{i} = relu_backward(g_{i}, h_{i})  # makes dh_{i}:40 | 10.0 us | microbatch {i}
    dv_{i} = mm(dh_{i}, x)  # makes dv_{i}:100 | 100.0 us | microbatch {i}
"""
SUMS = """
    dw = accumulate(dw_1, dw_2)  # holds dw_1
    dv = accumulate(dv_1, dv_2)  # holds dv_1
    return output y, gradient dw, gradient dv
"""


def layers(parts: int = 2) -> Trace:
    """Two layers, two parts."""
    lines = [INPUTS, *(FORWARD.format(i=i) for i in range(parts, 0, -1))]
    lines += ["y = cat(" + ", ".join(f"y_{i}" for i in range(1, parts + 1)) + ")  # makes y:8"]
    lines += ["backward:", *(BACKWARD.format(i=i) for i in range(1, parts + 1)), SUMS]
    return parse("\n".join(lines))


def test_each_section_runs_for_all_parts_before_the_next() -> None:
    assert_expected_inline(
        str(order_by_section(layers(), MACHINE)),
        """\
forward:
v = parameter()  # f32[25] | makes v:100
w = parameter()  # f32[25] | makes w:100
x = input()  # makes x:10
d = tangent()  # makes d:8
h_2 = mm(x, v)  # makes h_2:40 | 100.0 us | microbatch 2 | section 1
a_2 = relu(h_2)  # makes a_2:4 | 10.0 us | microbatch 2 | section 1
h_1 = mm(x, v)  # makes h_1:40 | 100.0 us | microbatch 1 | section 1
a_1 = relu(h_1)  # makes a_1:4 | 10.0 us | microbatch 1 | section 1
y_2 = mm(a_2, w)  # makes y_2:4 | 100.0 us | microbatch 2 | section 2
y_1 = mm(a_1, w)  # makes y_1:4 | 100.0 us | microbatch 1 | section 2
y = cat(y_1, y_2)  # makes y:8
backward:
g_1 = mm(d, w)  # makes g_1:4 | 100.0 us | microbatch 1 | section 2
dw_1 = mm(d, a_1)  # makes dw_1:100 | 100.0 us | microbatch 1 | section 2
g_2 = mm(d, w)  # makes g_2:4 | 100.0 us | microbatch 2 | section 2
dw_2 = mm(d, a_2)  # makes dw_2:100 | 100.0 us | microbatch 2 | section 2
dw = accumulate(dw_1, dw_2)  # holds dw_1
dh_1 = relu_backward(g_1, h_1)  # makes dh_1:40 | 10.0 us | microbatch 1 | section 1
dv_1 = mm(dh_1, x)  # makes dv_1:100 | 100.0 us | microbatch 1 | section 1
dh_2 = relu_backward(g_2, h_2)  # makes dh_2:40 | 10.0 us | microbatch 2 | section 1
dv_2 = mm(dh_2, x)  # makes dv_2:100 | 100.0 us | microbatch 2 | section 1
dv = accumulate(dv_1, dv_2)  # holds dv_1
return output y, gradient dw, gradient dv
""",
    )


def test_what_is_streamed_comes_once_a_section_and_phase() -> None:
    trace = order_by_section(layers(), MACHINE)
    fates = {"v": Placement.OFFLOAD, "w": Placement.OFFLOAD}
    plans = [schedule(ReuseGaps(each), fates, MACHINE) for each in (trace, layers())]
    by_section, in_parts = ([d.value for d in plan if isinstance(d, Reload)] for plan in plans)
    assert by_section == ["v", "w", "w"]
    assert in_parts == ["v", "w", "v", "w", "w", "w"]


def test_a_step_without_parts_is_left_as_it_is() -> None:
    trace = parse("\n".join([INPUTS, FORWARD.format(i=1).replace(" | microbatch 1", ""), "return output y_1"]))
    assert order_by_section(trace, MACHINE) is trace


def test_parts_that_read_other_parameters_are_left_as_they_are() -> None:
    trace = layers()
    ops = tuple(replace(op, reads=("a_1", "x")) if op.name == "y_1" else op for op in trace.ops)
    odd = replace(trace, ops=ops)
    assert order_by_section(odd, MACHINE) is odd


def test_it_is_cut_where_least_crosses() -> None:
    trace = order_by_section(layers(), MACHINE)
    assert trace.op["a_1"].section == 1  # what relu makes has 4 bytes, what it reads 40
    assert trace.op["dh_1"].section == 1


def test_parameters_that_are_small_together_share_a_section() -> None:
    trace = layers()
    small = {"w": replace(trace.op["w"], makes=(Storage("w", 4),)), "v": trace.op["v"]}
    ops = tuple(small.get(op.name, op) for op in trace.ops)
    larger = Op("u", "parameter", makes=(Storage("u", 104),), holds=("u",))
    assert {op.section for op in order_by_section(replace(trace, ops=(larger, *ops)), MACHINE).ops} == {0}


def test_the_order_of_a_saved_plan_is_restored() -> None:
    trace = order_by_section(layers(), MACHINE)
    assert order_like(layers(), trace) == trace
    assert order_like(layers(3), trace) == layers(3)


def parted(trace: Trace, parts: int) -> Trace:
    """Return a step of several parts, each equal to `trace`."""
    inputs = [op for op in trace.ops if op.is_input]
    fixed = {op.name for op in inputs} | {made.name for op in inputs for made in op.makes}

    def of(op: Op, part: int) -> Op:
        def own(name: str) -> str:
            return name if name in fixed else f"{name}_{part}"

        makes = tuple(Storage(own(made.name), made.nbytes) for made in op.makes)
        reads, holds = tuple(map(own, op.reads)), tuple(map(own, op.holds))
        return replace(op, name=own(op.name), reads=reads, makes=makes, holds=holds, microbatch=part)

    numbers = range(1, parts + 1)
    ops: list[Op] = []
    for phase, order in (("forward", numbers[::-1]), ("backward", numbers)):
        mine = [op for op in trace.ops if op.phase == phase and not op.is_input]
        ops += [op for op in inputs if op.phase == phase]
        ops += [of(op, i) for i in order for op in mine]
    return Trace(tuple(ops))


@given(traces(), machines(), st.integers(2, 4))
def test_sections_are_consecutive_and_none_is_empty(trace: Trace, machine: Machine, parts: int) -> None:
    before = parted(trace, parts)
    found = order_by_section(before, machine)
    check(found)
    assert {replace(op, section=0) for op in found.ops} == set(before.ops)
    for part in range(1, parts + 1):
        order = [op.section for op in found.ops if op.microbatch == part and op.phase == "forward"]
        assert order == sorted(order)
        backward = [op.section for op in found.ops if op.microbatch == part and op.phase == "backward"]
        assert backward == sorted(backward, reverse=True)
    numbers = {op.section for op in found.ops if op.microbatch and op.phase == "forward"}
    assert numbers in ({0}, set(range(1, max(numbers, default=0) + 1)), set())
    assert predict(found, machine).us == predict(before, machine).us
