"""Updates that stand in backward: what is decided around them, and what they forbid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given

from passes import BrokenTrace, Link, Machine, Recompute, Streaming, Trace, apply, check, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.order.early_updates import update_early
from passes.schedule.schedule import Placement, schedule
from tests.support.layered_traces import backward, forward, lines
from tests.support.strategies import traces

DW, P, DV = backward("v", "w")
STEP = parse(f"""
    forward:
    s = state()  # u8[200] | makes s:200
    r = state()  # u8[200] | makes r:200
    {forward("v", "w")}
    backward:
    {DW}
    {P}
    update:
    w_update = SGD.step(s, w, dw)  # workspace 40
    backward:
    {DV}
    update:
    v_update = SGD.step(r, v, dv)  # workspace 40
    return output b
""")
LINKED = Machine(0, link=Link(out=10.0, back=10.0), streaming=Streaming(enabled=True, window=60))


def planned(*storages: str, fate: Placement = Placement.OFFLOAD) -> Trace:
    applied = apply(STEP, schedule(ReuseGaps(STEP), dict.fromkeys(storages, fate), LINKED))
    check(applied)
    return applied


def test_an_update_stands_behind_the_last_use_of_what_it_changes() -> None:
    late = [op for op in STEP.ops if op.phase == "update"]
    at_the_end = replace(STEP, ops=(*(op for op in STEP.ops if op not in late), *late))
    assert update_early(at_the_end) == update_early(STEP) == STEP


def test_an_update_waits_for_what_forward_makes_of_its_parameter() -> None:
    """dv reads a, which a plan may make again, and of v."""
    wants = replace(STEP.op["dv"], reads=("p", "b"))
    found = update_early(replace(STEP, ops=tuple(wants if op.name == "dv" else op for op in STEP.ops)))
    assert lines(found).splitlines()[-4:] == [
        "p = g(d, w)",
        "dv = g(p, b)",
        "w_update = SGD.step(s, w, dw)",
        "v_update = SGD.step(r, v, dv)",
    ]


@given(trace=traces())
def test_updates_alone_move_and_only_once(trace: Trace) -> None:
    found = update_early(trace)
    check(found)
    assert update_early(found) == found
    assert sorted(found.ops, key=str) == sorted(trace.ops, key=str)
    assert [op for op in found.ops if op.phase != "update"] == [op for op in trace.ops if op.phase != "update"]


def test_a_gradient_is_live_until_its_update() -> None:
    gradients = {
        life.storage: (life.first, life.last) for life in predict(STEP, LINKED).lifetimes if life.producer[0] == "d"
    }
    at = {op.name: i for i, op in enumerate(STEP.ops)}
    assert gradients["dw"] == (at["dw"], at["w_update"])
    assert gradients["dv"] == (at["dv"], at["v_update"])


def test_an_offloaded_parameter_is_updated_from_the_tier_and_reloaded_for_other_ops() -> None:
    assert_expected_inline(
        lines(planned("s", "w")),
        """\
w__in_1 = memgraph.reload.default(w)
a = f(x, v)
w__back_1 = memgraph.wait.default(w__in_1)
b = f(a, w__back_1)
w__in_2 = memgraph.reload.default(w)
dw = g(d, a)
w__back_2 = memgraph.wait.default(w__in_2)
p = g(d, w__back_2)
w_update = SGD.step(s, w, dw)
dv = g(p, x)
v_update = SGD.step(r, v, dv)
""",
    )


def test_an_update_that_reads_from_the_tier_takes_a_window() -> None:
    forecast = predict(planned("r"), LINKED)
    taken = {op.name: int(n) for op, n in zip(forecast.trace.ops, forecast.by_kind["workspace"], strict=True) if n}
    assert taken == {"w_update": 40, "v_update": 60}


def test_what_an_update_has_changed_is_read_by_no_other_op() -> None:
    with pytest.raises(BrokenTrace, match="b__1 reads w, which an update has changed"):
        check(apply(STEP, (Recompute("b", before="v_update"),)))


def test_what_is_put_before_an_update_stands_in_backward() -> None:
    applied = apply(STEP, (Recompute("a", before="v_update"),))
    check(applied)
    assert applied.op["a__1"].phase == "backward"
    assert parse(str(applied)) == applied


def test_nor_is_its_gradient() -> None:
    late = replace(STEP.op["dv"], reads=("p", "dw"))
    with pytest.raises(BrokenTrace, match="dv reads dw, which an update has changed"):
        check(replace(STEP, ops=tuple(late if op.name == "dv" else op for op in STEP.ops)))
