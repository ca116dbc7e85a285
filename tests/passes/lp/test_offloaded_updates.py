"""Updates in backward that go through windows: when the disk works for them, and what is there meanwhile."""

from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline as expected

from passes import Link, Machine, Reload, Stream, Streaming, Trace, apply, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps, StreamableStates
from passes.lp.model import PlanModel
from passes.lp.problem import PlanProblem
from passes.lp.relax import relax
from passes.schedule.schedule import Placement, schedule
from passes.schedule.streamed_values import updates_of
from passes.simulate.forecast import staged_share

MACHINE = Machine(
    10_000, link=Link(out=10.0, back=10.0, half_duplex=True), streaming=Streaming(enabled=True, window=300)
)
AHEAD = replace(MACHINE, streaming=replace(MACHINE.streaming, update_staging=200))


def step(us: float = 50.0, rest: float = 5.0) -> Trace:
    """Two layers with offloaded parameters and states; each update has 400 bytes, and two windows hold half."""
    return parse(
        f"""\
forward:
r = state()  # u8[100] | makes r:0 | offloaded
s = state()  # u8[100] | makes s:0 | offloaded
v = parameter()  # u8[200] | makes v:0 | offloaded
w = parameter()  # u8[200] | makes w:0 | offloaded
x = input()  # u8[10] | makes x:10
o = sum(x)  # u8[4] | makes o:4 | 1.0 us
backward:
dv = mm(x, o)  # u8[100] | makes dv:100 | {us} us
update:
v_update = Adam.step(r, v, dv)  # 5.0 us
backward:
p = mul(x, o)  # u8[10] | makes p:10 | {us} us
dw = mm(p, o)  # u8[100] | makes dw:100 | 1.0 us
update:
w_update = Adam.step(s, w, dw)  # 5.0 us
backward:
q = mul(x, o)  # u8[10] | makes q:10 | {rest} us
return output o, output q"""
    )


def shown(trace: Trace, machine: Machine) -> str:
    """When each op of backward begins, and the bytes that are there for it."""
    forecast = predict(trace, machine)
    rows = zip(trace.ops, forecast.begins, forecast.total, strict=True)
    lines = [f"{op.name:8} {begin:6.1f} us {total:4} bytes" for op, begin, total in rows if op.phase != "forward"]
    return "\n".join([*lines, f"end      {forecast.us:6.1f} us"])


def test_without_room_between_updates_each_reads_and_writes_all_of_its_own() -> None:
    """300 bytes come and 300 go: 60 us."""
    expected(
        shown(step(), MACHINE),
        """\
dv          1.0 us  114 bytes
v_update   51.0 us  414 bytes
p         111.0 us   24 bytes
dw        161.0 us  124 bytes
w_update  162.0 us  414 bytes
q         222.0 us   24 bytes
end       227.0 us""",
    )


def test_windows_that_stay_are_read_ahead_and_written_late() -> None:
    """Half of each update's bytes leave behind it, and half of the second one's come ahead; from the first update on the
    windows are there."""
    expected(
        shown(step(), AHEAD),
        """\
dv          1.0 us  114 bytes
v_update   51.0 us  414 bytes
p          96.0 us  224 bytes
dw        146.0 us  324 bytes
w_update  147.0 us  414 bytes
q         177.0 us  224 bytes
end       192.0 us""",
    )


def test_what_is_written_late_has_left_when_the_step_ends() -> None:
    forecast = predict(step(rest=0.0), AHEAD)
    assert forecast.us == forecast.begins[-1] + 15.0


def test_an_update_waits_for_what_was_asked_for_before_it() -> None:
    """A disk that carries one way at a time is busy with 400 bytes for another 40 us."""
    text = str(step()).replace("dv = mm", "x__out = memgraph.offload.default(big)  # makes x__out:0\ndv = mm")
    trace = parse(text.replace("o = sum(x)", "big = relu(x)  # u8[800] | makes big:800\no = sum(x)"))
    alone, shared = (
        predict(trace, replace(MACHINE, link=replace(MACHINE.link, half_duplex=turns))) for turns in (False, True)
    )
    first = next(i for i, op in enumerate(trace.ops) if op.name == "v_update")
    assert shared.begins[first] == alone.begins[first]
    assert shared.begins[first + 1] == alone.begins[first + 1] + 30.0


def test_two_directions_of_a_disk_take_turns() -> None:
    trace = parse(
        """\
forward:
x = input()  # u8[100] | makes x:100
a = relu(x)  # u8[100] | makes a:100 | 1.0 us
b = relu(a)  # u8[100] | makes b:100 | 1.0 us
a__out = memgraph.offload.default(a)  # makes a__out:0
a__free = memgraph.free.default(a__out, a)
b__out = memgraph.offload.default(b)  # makes b__out:0
a__in_1 = memgraph.reload.default(a__out)  # u8[100] | makes a__in_1:100
a__back_1 = memgraph.wait.default(a__in_1)  # u8[100] | holds a__in_1
b__free = memgraph.free.default(b__out, b)
o = sum(a__back_1)  # u8[4] | makes o:4
return output o"""
    )
    both, turns = (
        predict(trace, replace(MACHINE, link=replace(MACHINE.link, half_duplex=turns))) for turns in (False, True)
    )
    assert [copy.begin for copy in both.copies] == [2.0, 12.0, 12.0] and both.us == 22.0
    assert [copy.begin for copy in turns.copies] == [2.0, 12.0, 22.0] and turns.us == 32.0


def test_a_reload_does_not_count_on_a_disk_that_is_busy_with_an_update() -> None:
    """`w` is wanted right behind the update of `v`, which takes the disk as long as it runs: so it comes before that."""
    text = str(step()).replace("mul(x, o)", "mul(x, w)", 1).replace("  # 5.0 us", "  # 500.0 us")
    for name, nbytes in (("r", 100), ("s", 100), ("v", 200), ("w", 200)):
        text = text.replace(f"makes {name}:0 | offloaded", f"makes {name}:{nbytes}")
    gaps = ReuseGaps(parse(text))
    far = {home: Placement.OFFLOAD for home in StreamableStates(gaps.trace).inputs if home in ("r", "s", "v", "w")}
    assert updates_of(gaps.trace, far) == {gaps.trace.index["v_update"], gaps.trace.index["w_update"]}
    backs = {
        machine.link.half_duplex: [
            decision.back for decision in schedule(gaps, far, machine) if isinstance(decision, Reload)
        ]
        for machine in (MACHINE, replace(MACHINE, link=replace(MACHINE.link, half_duplex=False)))
    }
    assert backs == {False: ["v_update"], True: ["dv"]}


def test_the_share_of_an_update_that_is_early_is_at_most_all_of_it() -> None:
    op = step().op["v_update"]
    assert staged_share(step(), op, AHEAD) == 0.5
    assert staged_share(step(), op, replace(AHEAD, streaming=replace(AHEAD.streaming, update_staging=1000))) == 1.0
    assert staged_share(step(), op, MACHINE) == 0.0


def test_what_is_proven_of_a_step_without_backward_is_true_of_it() -> None:
    """Its update belongs to neither phase."""
    trace = parse(
        """\
forward:
s = state()  # u8[300000] | makes s:300000
x = input()  # u8[10] | makes x:10
o = relu(x)  # u8[10] | makes o:10 | 1.0 us
update:
update = Adam.step(s)  # 5.0 us
return output o"""
    )
    machine = replace(
        MACHINE, streaming=replace(MACHINE.streaming, window=0), link=replace(MACHINE.link, out=10_000.0, back=10_000.0)
    )
    captured, far = predict(trace, machine), predict(apply(trace, (Stream("s"),)), machine)
    relaxed = relax(PlanModel(PlanProblem(ReuseGaps(trace), machine), far.peak))
    assert relaxed is not None and far.us - captured.us == 55.0
    assert relaxed.any_us <= 55.0 + 1e-6
