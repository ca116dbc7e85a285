"""An error says where a budget is broken, what lies there, from which lines, and what would lower it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import BudgetError, Link, Machine, Streaming, Trace, make_plan, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.explain import STREAM, TIER, _in_use, explain_infeasible
from passes.lp import state_vars
from passes.lp.problem import PlanProblem
from tests.support.strategies import traces

LOSS = parse("""
    forward:
    w = parameter()  # u8[50] | makes w:50
    x = input()  # u8[100] | makes x:100
    d = tangent()  # u8[4] | makes d:4
    a = mm(x, w)  # u8[1000] | makes a:1000 | 10.0 us | at layers.0 model.py:7
    b = gelu(a)  # u8[1000] | makes b:1000 | 10.0 us | at layers.0 model.py:8
    c = mm(b, w)  # u8[1800] | makes c:1800 | 10.0 us | at head model.py:9
    l = log_softmax(c)  # u8[1800] | makes l:1800 | 10.0 us | at loss model.py:20
    o = mean(l)  # u8[4] | makes o:4 | 10.0 us | at loss model.py:21
    backward:
    m = mean_backward(d, l)  # u8[1800] | makes m:1800 | 10.0 us | at loss model.py:21
    n = log_softmax_backward(m, l)  # u8[1800] | makes n:1800 | 10.0 us | at loss model.py:20
    p = mm_backward(n, b)  # u8[100] | makes p:100 | 10.0 us | at head model.py:9
    q = gelu_backward(p, a)  # u8[100] | makes q:100 | 10.0 us | at layers.0 model.py:8
    r = mm_backward(q, x)  # u8[50] | makes r:50 | 10.0 us | at layers.0 model.py:7
    return output o, gradient r
""")
ONCE = parse("""
    forward:
    x = input()  # u8[100] | makes x:100
    d = tangent()  # u8[4] | makes d:4
    a = dropout(x)  # u8[1000] | makes a:1000 | once | 10.0 us | at layers.0 model.py:7
    b = dropout(a)  # u8[1100] | makes b:1100 | once | 10.0 us | at layers.1 model.py:7
    c = dropout(b)  # u8[900] | makes c:900 | once | 10.0 us | at layers.2 model.py:7
    o = sum(c)  # u8[4] | makes o:4 | 10.0 us | at head model.py:9
    backward:
    p = sum_backward(d, c)  # u8[100] | makes p:100 | 10.0 us | at head model.py:9
    q = dropout_backward(p, b)  # u8[100] | makes q:100 | 10.0 us | at layers.1 model.py:7
    r = dropout_backward(q, a)  # u8[100] | makes r:100 | 10.0 us | at layers.0 model.py:7
    return output o, gradient r
""")
HEAVY = parse("""
    forward:
    w = parameter()  # u8[5000] | makes w:5000
    x = input()  # u8[100] | makes x:100
    d = tangent()  # u8[4] | makes d:4
    a = mm(x, w)  # u8[100] | makes a:100 | 10.0 us
    backward:
    r = mm_backward(d, a)  # u8[5000] | makes r:5000 | 10.0 us
    return output a, gradient r
""")


def message(trace: Trace, machine: Machine) -> str:
    with pytest.raises(BudgetError) as raised:
        make_plan(trace, machine)
    return str(raised.value) + "\n"


def test_the_floor_names_its_op_line_and_buffers_and_a_loss_its_chunks() -> None:
    assert_expected_inline(
        message(LOSS, Machine(3000)),
        """\
3000 bytes are allowed; the smallest budget for which a plan was found is 5558.
Peak memory is at n (log_softmax_backward, loss model.py:20). Live on cpu at that point:
            1800 bytes  activation l u8[1800] loss model.py:20
            1800 bytes  temporary  m u8[1800] loss model.py:21
            1800 bytes  temporary  n u8[1800] loss model.py:20
             100 bytes  input      x u8[100]
              50 bytes  parameter  w u8[50]
               4 bytes  tangent    d u8[4]
               4 bytes  output     o u8[4] loss model.py:21
No plan can use less than 5558 bytes: that many are in use at n at the same time.
Most of that is temporary (3600 bytes) and activation (1800 bytes).
Give budget=5558, or smaller batches, whose gradients add up, or microbatches= (the batch in more parts within the step), if its rows do not need each other, or a loss that is computed in chunks, as with slices='auto'.
""",
    )


def test_a_loss_that_is_sliced_already_is_not_advised_to_be() -> None:
    sliced = replace(LOSS, ops=tuple(replace(op, section=1) if "softmax" in op.fn else op for op in LOSS.ops))
    assert "in chunks" in message(LOSS, Machine(3000)) and "in chunks" not in message(sliced, Machine(3000))


def test_a_floor_that_is_elsewhere_than_the_least_peak_is_listed() -> None:
    assert_expected_inline(
        message(ONCE, Machine(2000)),
        """\
2000 bytes are allowed; the smallest budget for which a plan was found is 3208.
Peak memory is at p (sum_backward, head model.py:9). Live on cpu at that point:
            1100 bytes  activation b u8[1100] layers.1 model.py:7
            1000 bytes  activation a u8[1000] layers.0 model.py:7
             900 bytes  activation c u8[900] layers.2 model.py:7
             100 bytes  input      x u8[100]
             100 bytes  temporary  p u8[100] head model.py:9
               4 bytes  tangent    d u8[4]
               4 bytes  output     o u8[4] head model.py:9
No plan can use less than 2200 bytes: that many are in use at b (dropout, layers.1 model.py:7) at the same time:
            1100 bytes  activation b u8[1100] layers.1 model.py:7
            1000 bytes  activation a u8[1000] layers.0 model.py:7
             100 bytes  input      x u8[100]
Most of that is activation (2100 bytes).
Give budget=3208, or smaller batches, whose gradients add up, or microbatches= (the batch in more parts within the step), if its rows do not need each other.
""",
    )


def test_above_the_floor_a_tier_may_help() -> None:
    floor = int(PlanProblem(ReuseGaps(ONCE), Machine(0)).floor.max())
    said = message(ONCE, Machine(floor))
    assert "No plan can do" not in said and TIER in said
    assert TIER not in message(ONCE, Machine(floor, link=Link(out=1.0, back=1.0, staging=5000)))


def test_where_state_is_at_the_peak_offloading_it_to_disk_is_advised() -> None:
    assert STREAM in message(HEAVY, Machine(6000))
    assert STREAM not in message(HEAVY, Machine(6000, device="cuda:0"))
    assert STREAM not in message(HEAVY, Machine(600, link=Link(out=1.0, back=1.0), streaming=Streaming(enabled=True)))
    assert "smaller batch" not in message(HEAVY, Machine(6000))


@settings(max_examples=60)
@given(traces(), st.booleans())
def test_what_is_in_use_is_all_that_the_floor_counts(trace: Trace, homes: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_vars, "SMALLEST_STREAMED", 1)  # so that the small state of these traces may be offloaded
        program = PlanProblem(
            ReuseGaps(trace), Machine(0, link=Link(out=1.0, back=1.0), streaming=Streaming(enabled=homes))
        )
        for at in range(len(trace.ops)):
            assert sum(life.nbytes for life in _in_use(program, at)) + program.least_workspace(at) == program.floor[at]


@settings(max_examples=20)
@given(traces(max_forward=10))
def test_the_floor_is_said_whenever_it_is_in_the_way(trace: Trace) -> None:
    floor = int(PlanProblem(ReuseGaps(trace), Machine(0)).floor.max(initial=0.0))
    if floor:
        assert f"No plan can use less than {floor} bytes" in message(trace, replace(Machine(0), budget=floor - 1))


def test_an_update_in_windows_takes_what_its_window_does() -> None:
    captured = parse("""
        forward:
        w = parameter()  # u8[5000] | makes w:5000
        x = input()  # u8[100] | makes x:100
        o = mm(x, w)  # u8[100] | makes o:100 | 10.0 us
        update:
        step = SGD.step(w, o)  # workspace 9000 | 10.0 us
        return output o
    """)
    far = parse(str(captured).replace("makes w:5000", "makes w:0 | holds w | offloaded").replace("mm(x, w)", "mm(x)"))
    machine = Machine(100, link=Link(out=1.0, back=1.0), streaming=Streaming(enabled=True, window=700))
    text = explain_infeasible(predict(far, machine), machine, captured)
    assert "           700 bytes  workspace  of step itself" in text
    assert "-" not in text.partition("No plan")[0]
