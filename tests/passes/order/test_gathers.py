"""Gathers of parameters in forward: where they begin and end, what they take, and what they forbid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from passes import BrokenTrace, Machine, Network, Trace, check, make_plan, parse, predict
from passes.analysis.reuse_gaps import StreamableStates
from passes.order.comm_order import place_collectives, sequence
from tests.support.layered_traces import placed_lines

# n is read first, with v, and goes alone; l and m are packed, as are s and t; w is in two buckets; u is not read.
STEP = parse("""
    forward:
    l = parameter()  # u8[10] | makes l:10
    m = parameter()  # u8[10] | makes m:10
    n = parameter()  # u8[100] | makes n:100
    s = parameter()  # u8[20] | makes s:20
    t = parameter()  # u8[20] | makes t:20
    u = parameter()  # u8[100] | makes u:100
    v = parameter()  # u8[30] | makes v:30
    w = parameter()  # u8[100] | makes w:100
    x = input()  # u8[100] | makes x:100
    d = tangent()  # u8[100] | makes d:100
    u_sent = memgraph.gather.default(u)  # u8[100] | makes u_sent:1 | once
    u_here = memgraph.gathered.default(u_sent, u)
    w_room = memgraph.room.default(w)  # u8[60] | makes w_room:60
    w_sent = memgraph.gather.default(w, v)  # u8[80] | makes w_sent:1 | once
    w_here = memgraph.gathered.default(w_sent, w, v, w_room)
    z_sent = memgraph.gather.default(w)  # u8[50] | makes z_sent:1 | once
    z_here = memgraph.gathered.default(z_sent, w)
    l_room = memgraph.room.default(l)  # u8[20] | makes l_room:20
    l_sent = memgraph.gather.default(l, m)  # u8[20] | makes l_sent:1 | once
    l_here = memgraph.gathered.default(l_sent, l, m, l_room)
    n_sent = memgraph.gather.default(n)  # u8[100] | makes n_sent:1 | once
    n_here = memgraph.gathered.default(n_sent, n)
    t_room = memgraph.room.default(t)  # u8[40] | makes t_room:40
    t_sent = memgraph.gather.default(s, t)  # u8[40] | makes t_sent:1 | once
    t_here = memgraph.gathered.default(t_sent, s, t, t_room)
    a = f(x, n, v)  # u8[100] | makes a:100 | 10.0 us
    y = view(w)  # u8[100] | holds w
    b = f(a, m)  # u8[100] | makes b:100 | 10.0 us
    c = f(b, y)  # u8[100] | makes c:100 | 10.0 us
    e = f(c, l, s)  # u8[100] | makes e:100 | 10.0 us
    backward:
    dt = g(d, t)  # u8[20] | makes dt:20 | 10.0 us
    p = g(d, c)  # u8[100] | makes p:100 | 10.0 us
    q = g(p, b)  # u8[100] | makes q:100 | 10.0 us
    dw = g(q, a)  # u8[100] | makes dw:100 | 10.0 us
    update:
    step = SGD.step(dw, w)
    return output e, gradient dt, gradient dw
""")
MACHINE = Machine(1 << 20, network=Network(rate=10.0, latency_us=1.0))


def test_gathers_begin_in_the_order_of_first_use_and_end_there() -> None:
    assert_expected_inline(
        placed_lines(STEP),
        """\
w_room = memgraph.room.default(w)
w_sent = memgraph.gather.default(w, v)
n_sent = memgraph.gather.default(n)
z_sent = memgraph.gather.default(w)
l_room = memgraph.room.default(l)
l_sent = memgraph.gather.default(l, m)
w_here = memgraph.gathered.default(w_sent, w, v, w_room)
t_room = memgraph.room.default(t)
t_sent = memgraph.gather.default(s, t)
u_sent = memgraph.gather.default(u)
n_here = memgraph.gathered.default(n_sent, n)
a = f(x, n, v)
z_here = memgraph.gathered.default(z_sent, w)
y = view(w)
l_here = memgraph.gathered.default(l_sent, l, m, l_room)
b = f(a, m)
c = f(b, y)
t_here = memgraph.gathered.default(t_sent, s, t, t_room)
e = f(c, l, s)
u_here = memgraph.gathered.default(u_sent, u)
dt = g(d, t)
p = g(d, c)
q = g(p, b)
dw = g(q, a)
step = SGD.step(dw, w)
""",
    )


def test_what_takes_room_begins_where_it_is_waited_for_if_nothing_hides_it() -> None:
    assert_expected_inline(
        placed_lines(STEP, at_once=True),
        """\
w_room = memgraph.room.default(w)
w_sent = memgraph.gather.default(w, v)
n_sent = memgraph.gather.default(n)
z_sent = memgraph.gather.default(w)
w_here = memgraph.gathered.default(w_sent, w, v, w_room)
n_here = memgraph.gathered.default(n_sent, n)
a = f(x, n, v)
z_here = memgraph.gathered.default(z_sent, w)
y = view(w)
l_room = memgraph.room.default(l)
l_sent = memgraph.gather.default(l, m)
l_here = memgraph.gathered.default(l_sent, l, m, l_room)
b = f(a, m)
c = f(b, y)
t_room = memgraph.room.default(t)
t_sent = memgraph.gather.default(s, t)
u_sent = memgraph.gather.default(u)
t_here = memgraph.gathered.default(t_sent, s, t, t_room)
e = f(c, l, s)
u_here = memgraph.gathered.default(u_sent, u)
dt = g(d, t)
p = g(d, c)
q = g(p, b)
dw = g(q, a)
step = SGD.step(dw, w)
""",
    )
    assert place_collectives(place_collectives(STEP, at_once=True)) == place_collectives(STEP)


def test_they_come_one_after_the_other_beside_compute() -> None:
    forecast = predict(place_collectives(STEP), MACHINE)
    net = {copy.value: (copy.begin, copy.end) for copy in forecast.copies}
    assert net == {
        "w_sent": (0.0, 9.0), "n_sent": (9.0, 20.0), "z_sent": (20.0, 26.0), "l_sent": (26.0, 29.0),
        "t_sent": (29.0, 34.0), "u_sent": (34.0, 45.0),
    }  # fmt: skip
    begins = dict(zip([op.name for op in forecast.trace.ops], forecast.begins, strict=True))
    assert (begins["a"], begins["b"], begins["c"], begins["e"], begins["dt"]) == (20.0, 30.0, 40.0, 50.0, 60.0)
    strained = replace(MACHINE, network=replace(MACHINE.network, interference=1.0))
    assert (
        predict(place_collectives(STEP, at_once=True), strained).us
        == predict(place_collectives(STEP), strained).us
        == 45.0 + 80.0
    )


def test_room_is_there_until_what_takes_it_has_come() -> None:
    forecast = predict(place_collectives(STEP), MACHINE)
    ops = [op.name for op in forecast.trace.ops]
    there = {life.storage: (ops[life.first], ops[life.last], life.kind) for life in forecast.lifetimes}
    assert there["w_room"] == ("w_room", "w_here", "temporary")
    assert there["l_room"] == ("l_room", "l_here", "temporary")
    assert forecast.by_kind["temporary"][ops.index("l_sent")] == 60 + 20 + 1 * 4


def test_no_op_reads_what_is_yet_to_be_gathered() -> None:
    with pytest.raises(BrokenTrace, match="early reads what w_here has yet to wait for"):
        early = replace(STEP.op["y"], name="early")
        check(Trace((*STEP.ops[:10], early, *STEP.ops[10:]), STEP.outputs))
    found = list(place_collectives(STEP).ops)
    at = next(i for i, op in enumerate(found) if op.name == "z_here")
    with pytest.raises(BrokenTrace, match="y reads what z_here has yet to wait for"):
        check(Trace((*found[:at], found[at + 1], found[at], *found[at + 2 :]), STEP.outputs))


def test_a_gathered_parameter_is_not_offloaded() -> None:
    alone = Trace(tuple(op for op in STEP.ops if not op.name.startswith("u_")), STEP.outputs)
    assert set(StreamableStates(alone).inputs) == {"u"}


def test_a_budget_is_kept_with_gathers_in_the_step() -> None:
    trace = place_collectives(STEP)
    full = predict(trace, MACHINE).peak
    found = make_plan(trace, replace(MACHINE, budget=full - 100, link=replace(MACHINE.link, out=50.0, back=50.0)))
    assert found.plan and found.forecast.peak <= full - 100
    check(found.forecast.trace)


def test_all_ranks_gather_in_the_order_of_the_text() -> None:
    said = [line.split()[0] for line in sequence(place_collectives(STEP)).splitlines()]
    assert said == ["w_sent", "n_sent", "z_sent", "l_sent", "t_sent", "u_sent"]
