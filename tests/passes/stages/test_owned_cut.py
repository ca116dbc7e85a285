"""Another call of a cut model runs where its parameters are: the same step in the same stages, a part of it as well."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from passes import Trace, parse
from passes.stages.cut import best_cut
from passes.stages.interval_costs import IntervalCosts
from passes.stages.owned_cut import begins_by_owners
from passes.stages.places import Places
from passes.stages.stage_trace import stage_trace

from .test_cut import traces

FORWARD = """
    forward:
    w = parameter()  # makes w:40
    v = parameter()  # makes v:50
    x = input()  # makes x:10
    a = mm(x, w)  # makes a:11 | 5.0 us
    b = relu(a)  # makes b:12 | 1.0 us
    c = gelu(b)  # makes c:12 | 1.0 us
    d = mm(c, v)  # makes d:13 | 6.0 us
    return output d
    """


def _owners(trace: Trace, begins: tuple[int, ...]) -> dict[str, list[int]]:
    """Return the stages that read each parameter."""
    places = Places(trace)
    ends = (*begins[1:], trace.boundary)
    stages = [stage_trace(places, begin, end) for begin, end in zip(begins, ends, strict=True)]
    names = [op.name for op in trace.ops if op.fn in ("parameter", "buffer")]
    return {name: [k for k, stage in enumerate(stages) if name in stage.op] for name in names}


@given(traces(), st.integers(1, 4))
def test_the_same_step_has_each_parameter_where_it_was(trace: Trace, count: int) -> None:
    costs = IntervalCosts(Places(trace))
    assume(len(costs.borders) > count)
    begins = tuple(stage.begin for stage in best_cut(costs, [math.inf] * count, [1] * count).stages)
    owners = _owners(trace, begins)
    read = {name: stages for name, stages in owners.items() if stages}
    try:
        again = begins_by_owners(costs.places, read, count, [trace.ops[begin] for begin in begins])
    except ValueError as error:  # a stage without parameters may have no room between its neighbours
        assert "has no ops" in str(error)
        return
    for name, stages in _owners(trace, again).items():
        assert set(stages) <= set(owners[name])


@pytest.mark.parametrize("first, begins", [("relu", (0, 4)), ("gelu", (0, 5)), ("mm", (0, 6)), ("tanh", (0, 4))])
def test_a_stage_begins_at_the_op_at_which_it_began_before(first: str, begins: tuple[int, int]) -> None:
    trace = parse(FORWARD)
    ops = [trace.ops[3], replace(trace.ops[4], fn=first)]
    assert begins_by_owners(Places(trace), {"w": [0], "v": [1]}, 2, ops) == begins


def test_what_only_an_earlier_stage_has_is_refused() -> None:
    trace = parse(FORWARD)
    with pytest.raises(ValueError, match="d at  needs v, which stage 0 has, and runs behind ops of stage 1"):
        begins_by_owners(Places(trace), {"w": [1], "v": [0]}, 2, trace.ops)


def test_a_stage_without_room_is_refused() -> None:
    trace = parse(FORWARD)
    with pytest.raises(ValueError, match="stage 2 of 3 has no ops"):
        begins_by_owners(Places(trace), {"w": [0], "v": [1]}, 3, trace.ops)


BACKWARD = """
    backward:
    gc = mm(t, v)  # makes gc:12 | 6.0 us
    gb = gelu_backward(gc, b, m)  # makes gb:12 | 1.0 us
    return output d, input_gradient gb
    """


def test_an_input_that_backward_alone_reads_is_where_it_was() -> None:
    inputs = "forward:\n    m = buffer()  # makes m:1\n    t = tangent()  # makes t:1"
    trace = parse(FORWARD.replace("forward:", inputs).replace("return output d", "").rstrip() + BACKWARD)
    first = [trace.ops[5], trace.ops[8]]  # where gelu would be of stage 0
    assert begins_by_owners(Places(trace), {"w": [0], "v": [1]}, 2, first) == (0, 8)
    assert begins_by_owners(Places(trace), {"w": [0], "m": [1], "v": [1]}, 2, first) == (0, 6)
