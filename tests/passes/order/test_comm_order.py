"""Exchanges of gradients between ranks: where they begin and end, what they take, and what they forbid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from passes import BrokenTrace, BudgetError, Machine, Network, Trace, check, make_plan, parse, predict
from passes.order.comm_order import place_collectives
from tests.support.layered_traces import backward, forward, placed_lines

BACKWARD = "\n".join(backward("v", "w"))
STEP = parse(f"""
    forward:
    {forward("v", "w")}
    backward:
    {BACKWARD}
    t = memgraph_oss.piece.default(dw)  # u8[10] | makes t:10 | 1.0 us
    q = memgraph_oss.pack.default(dv, t)  # u8[110] | makes q:110 | 1.0 us
    q_part = memgraph.reduce_scatter.default(q)  # u8[55] | makes q_part:55
    q_shard = memgraph.reduced.default(q_part, q)  # u8[55] | holds q_part
    r = memgraph.stretch.default(dw)  # u8[50] | holds dw
    r_part = memgraph.reduce_scatter.default(r)  # u8[25] | makes r_part:25
    r_shard = memgraph.reduced.default(r_part, r)  # u8[25] | holds r_part
    update:
    step = SGD.step(q_shard, r_shard, v, w)
    return output b, shard q_shard, shard r_shard
""")
MACHINE = Machine(1 << 20, network=Network(rate=10.0, latency_us=2.0))


def test_an_exchange_begins_behind_its_last_gradient_and_ends_before_the_next() -> None:
    assert_expected_inline(
        placed_lines(STEP),
        """\
a = f(x, v)
b = f(a, w)
dw = g(d, a)
t = memgraph_oss.piece.default(dw)
r = memgraph.stretch.default(dw)
r_part = memgraph.reduce_scatter.default(r)
p = g(d, w)
dv = g(p, x)
r_shard = memgraph.reduced.default(r_part, r)
q = memgraph_oss.pack.default(dv, t)
q_part = memgraph.reduce_scatter.default(q)
q_shard = memgraph.reduced.default(q_part, q)
step = SGD.step(q_shard, r_shard, v, w)
""",
    )


def test_what_is_added_to_a_shard_waits_with_it() -> None:
    there = parse("""
        s = gradient()  # u8[50] | makes s:50
        backward:
        r_sum = memgraph.accumulate(s, r_shard)  # u8[50] | holds s
        return
    """).ops
    ops = [there[0], *STEP.ops[:-1], there[1], STEP.ops[-1]]
    assert_expected_inline(
        placed_lines(Trace(tuple(ops), STEP.outputs)),
        """\
a = f(x, v)
b = f(a, w)
dw = g(d, a)
t = memgraph_oss.piece.default(dw)
r = memgraph.stretch.default(dw)
r_part = memgraph.reduce_scatter.default(r)
p = g(d, w)
dv = g(p, x)
r_shard = memgraph.reduced.default(r_part, r)
r_sum = memgraph.accumulate(s, r_shard)
q = memgraph_oss.pack.default(dv, t)
q_part = memgraph.reduce_scatter.default(q)
q_shard = memgraph.reduced.default(q_part, q)
step = SGD.step(q_shard, r_shard, v, w)
""",
    )


def test_a_step_without_exchanges_is_left_as_it_is() -> None:
    bare = Trace(STEP.ops[:9], STEP.outputs[:1])
    assert place_collectives(bare) is bare


def test_a_gradient_that_backward_begins_with_is_packed_there() -> None:
    ops = tuple(replace(op, reads=("d",), holds=("d",)) if op.name == "r" else op for op in STEP.ops)
    found = place_collectives(Trace(ops, STEP.outputs))
    check(found)
    assert [op.name for op in found.ops[6:9]] == ["r", "r_part", "dw"]


def test_only_what_is_packed_waits_for_another_that_is_packed_at_the_same_place() -> None:
    more = parse("""
        backward:
        y = memgraph.stretch.default(dw)  # u8[50] | holds dw
        y_part = memgraph.reduce_scatter.default(y)  # u8[25] | makes y_part:25
        y_shard = memgraph.reduced.default(y_part, y)  # u8[25] | holds y_part
        z = memgraph_oss.pack.default(dv, t)  # u8[110] | makes z:110 | 1.0 us
        z_part = memgraph.reduce_scatter.default(z)  # u8[55] | makes z_part:55
        z_shard = memgraph.reduced.default(z_part, z)  # u8[55] | holds z_part
        return
    """).ops
    found = place_collectives(Trace((*STEP.ops[:-1], *more, STEP.ops[-1]), STEP.outputs))
    check(found)
    begun = [op.name for op in found.ops if op.name.endswith(("_part", "_shard"))]
    assert begun == ["r_part", "y_part", "r_shard", "y_shard", "q_part", "q_shard", "z_part", "z_shard"]


def test_the_network_is_a_queue_beside_compute() -> None:
    """dw is exchanged while p and dv are computed; for dv, the last, compute waits."""
    forecast = predict(place_collectives(STEP), MACHINE)
    net = {copy.value: (copy.begin, copy.end) for copy in forecast.copies}
    assert net == {"r_part": (31.0, 43.0), "q_part": (52.0, 65.0)}
    assert forecast.us == 65.0
    assert (
        predict(place_collectives(STEP), replace(MACHINE, network=replace(MACHINE.network, rate=1.0))).us
        == 31.0 + 102.0 + 1.0 + 112.0
    )


def test_compute_waits_at_once_for_what_nothing_hides() -> None:
    found = place_collectives(STEP, at_once=True)
    check(found)
    assert place_collectives(found, at_once=True) == found and place_collectives(found) == place_collectives(STEP)
    ops = [op.name for op in found.ops]
    assert [ops[ops.index(name) + 1] for name in ("r_part", "q_part")] == ["r_shard", "q_shard"]


def test_compute_loses_a_share_of_the_time_of_an_exchange() -> None:
    strained = replace(MACHINE, network=replace(MACHINE.network, interference=0.5))
    forecast = predict(place_collectives(STEP), strained)
    assert forecast.begins[forecast.trace.ops.index(STEP.op["p"])] == 31.0 + 0.5 * 12.0
    assert strained.network.overlaps_comm and not Network(interference=1.1).overlaps_comm
    # What is waited for at once takes its time, whatever it does to compute.
    at_once = place_collectives(STEP, at_once=True)
    assert (
        predict(at_once, replace(MACHINE, network=replace(MACHINE.network, interference=2.0))).us
        == predict(at_once, MACHINE).us
    )


def test_gradients_are_there_until_they_are_packed_and_what_is_packed_until_it_has_arrived() -> None:
    forecast = predict(place_collectives(STEP), MACHINE)
    ops = [op.name for op in forecast.trace.ops]
    there = {life.storage: (ops[life.first], ops[life.last], life.kind) for life in forecast.lifetimes}
    assert there["dw"] == ("dw", "r_shard", "temporary")
    assert there["q"] == ("q", "q_shard", "temporary")
    assert there["dv"] == ("dv", "q", "temporary")
    assert there["r_part"] == ("r_part", "step", "gradient")


def test_no_op_reads_the_result_of_a_pending_collective() -> None:
    late = replace(STEP.op["p"], name="late", reads=("r_part",), makes=(), holds=())
    found = list(place_collectives(STEP).ops)
    at = next(i for i, op in enumerate(found) if op.name == "r_shard")
    with pytest.raises(BrokenTrace, match="late reads r_part, which a collective has yet to fill"):
        check(Trace((*found[:at], late, *found[at:]), STEP.outputs))


def test_a_machine_with_a_network_says_so() -> None:
    assert (
        str(Machine(8, network=Network(rate=1000.0, latency_us=20.0)))
        == "cpu 8 bytes, no tier, net 1000 MB/s after 20 us"
    )


def test_the_smallest_budget_is_the_same_whether_collectives_overlap_compute_or_not() -> None:
    ways = place_collectives(STEP), place_collectives(STEP, at_once=True)
    peaks = [predict(way, MACHINE).peak for way in ways]
    assert peaks[1] < peaks[0]
    with pytest.raises(BudgetError) as refused:
        make_plan(ways[0], replace(MACHINE, budget=1))
    assert refused.value.smallest == peaks[1]
    found = [make_plan(way, replace(MACHINE, budget=peaks[1])) for way in ways]
    assert [each.forecast.peak for each in found] == [peaks[1], peaks[1]]
    assert found[0].forecast.trace == ways[1]
