"""Each invariant is broken once, and the error names the op that breaks it."""

from __future__ import annotations

import pytest
from hypothesis import given

from passes import BrokenTrace, Offload, Plan, Recompute, Reload, Trace, apply, check, parse
from tests.support.strategies import planned

STEP = """
    forward:
    x = input()  # makes x:8
    d = tangent()  # makes d:8
    a = relu(x)  # u8[8] | makes a:8
    v = view(a)  # holds a
    n = dropout(v)  # makes n:8 | draws 16
    u = copy_(x, n)  # holds x | once
    backward:
    g = mul(d, a)  # makes g:8
    h = mul(g, n)  # makes h:8
    return output n, gradient h
"""


def broken(old: str, new: str) -> str:
    """Return the error of `check` for the step with a line changed."""
    assert old in STEP
    with pytest.raises(BrokenTrace) as raised:
        check(parse(STEP.replace(old, new)))
    return str(raised.value)


def refused(*plan: Recompute | Offload | Reload) -> str:
    """Return the error of `check` for the step with a plan applied."""
    applied = apply(parse(STEP), plan)
    with pytest.raises(BrokenTrace) as raised:
        check(applied)
    return str(raised.value)


def test_nothing_is_broken_in_a_step_as_it_should_be() -> None:
    check(parse(STEP))
    check(Trace(()))


def test_a_broken_trace_is_a_defect_of_ours() -> None:
    assert issubclass(BrokenTrace, AssertionError)


def test_a_value_is_defined_once() -> None:
    assert broken("h = mul(g, n)  # makes h:8", "g = mul(g, n)  # makes h:8") == "g is defined twice"


def test_a_storage_is_made_once() -> None:
    assert broken("makes h:8", "makes a:8") == "h makes a, which has been made before"


def test_a_value_is_defined_before_it_is_read() -> None:
    assert broken("a = relu(x)", "a = relu(g)") == "a reads g before it is defined"
    assert broken("a = relu(x)", "a = relu(a)") == "a reads a before it is defined"


def test_forward_stands_before_backward() -> None:
    assert broken("h = mul", "forward:\nh = mul") == "h is a forward op behind a backward op"
    assert broken("h = mul", "update:\ns = sgd(g)\nforward:\nh = mul") == "h is a forward op behind a backward op"


def test_inputs_may_stand_in_backward() -> None:
    check(parse(STEP.replace("h = mul", "forward:\np = gradient()  # makes p:8\nbackward:\nh = mul")))


def test_a_value_holds_only_what_its_op_can_reach() -> None:
    assert (
        broken("v = view(a)  # holds a", "v = view(a)  # holds x")
        == "v holds x, which neither it nor what it reads makes"
    )
    assert broken("holds x | once", "holds x, a | once") == "u holds a, which neither it nor what it reads makes"


def test_what_is_handed_out_has_been_defined() -> None:
    assert broken("gradient h", "gradient k") == "the step returns gradient k, which no op defines"


def test_an_offloaded_value_is_not_read_before_it_is_reloaded() -> None:
    assert refused(Offload("a", out="a", free="n")) == "g reads a, which has been freed on the device"
    assert refused(Offload("a", out="a", free="a")) == "v reads a, which has been freed on the device"
    assert (
        refused(Offload("a", out="a", free="n"), Reload("a", back="g", use="h"))
        == "g reads a, which has been freed on the device"
    )


def test_a_cast_and_offloaded_value_is_not_read_before_it_is_reloaded() -> None:
    typed = parse(STEP.replace("makes a:8", "f32[2] | makes a:8"))
    sent = Offload("a", out="a", free="n", wire="bf16")
    with pytest.raises(BrokenTrace, match="g reads a, which has been freed on the device"):
        check(apply(typed, (sent,)))
    check(apply(typed, (sent, Reload("a", back="g", use="g"))))


def test_a_view_of_an_offloaded_value_is_not_read_either() -> None:
    plan = (Offload("a", out="a", free="n"), Reload("a", back="g", use="g"))
    check(apply(parse(STEP), plan))
    late = parse(STEP.replace("h = mul(g, n)", "h = mul(g, v)"))
    with pytest.raises(BrokenTrace, match="h reads a, which has been freed on the device"):
        check(apply(late, plan))
    check(apply(late, (*plan, Recompute("v", before="h"))))


def test_only_an_offloaded_value_can_be_reloaded() -> None:
    assert refused(Reload("a", back="g", use="g")) == "a__in_1 reads a__out before it is defined"


def test_an_op_that_may_run_once_is_not_recomputed() -> None:
    assert refused(Recompute("u", before="g")) == "u__1 recomputes u, which may run once"


@pytest.mark.parametrize("swap", ["n__1__swap", "n__1__back"])
def test_random_numbers_are_recomputed_only_between_two_swaps(swap: str) -> None:
    applied = apply(parse(STEP), (Recompute("n", before="g"),))
    check(applied)
    with pytest.raises(BrokenTrace, match="n__1 draws random numbers without the generator state of its first run"):
        check(Trace(tuple(op for op in applied.ops if op.name != swap), applied.outputs))


@given(planned())
def test_taking_any_line_out_that_is_read_breaks_a_step(both: tuple[Trace, Plan]) -> None:
    applied = apply(*both)
    read = {name for op in applied.ops for name in op.reads}
    for name in sorted(read):
        with pytest.raises(BrokenTrace):
            check(Trace(tuple(op for op in applied.ops if op.name != name), applied.outputs))
