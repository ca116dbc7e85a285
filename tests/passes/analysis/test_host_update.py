"""Offloaded states are updated on the host where that makes the update shorter, and its forecast adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from passes import (
    BrokenTrace,
    Link,
    Machine,
    Offload,
    Plan,
    Stream,
    Streaming,
    Trace,
    apply,
    check,
    make_plan,
    parse,
    parse_plan,
    predict,
)
from passes.analysis.host_update import host_updated_states
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp import state_vars
from passes.schedule.schedule import Placement, schedule
from passes.search import greedy
from passes.simulate.forecast import update_nbytes

SIZES = (1000, 1000, 3000)


def trace_of(each: int) -> Trace:
    """Three layers with `each` bytes of states for one of a parameter; behind each part of the states stand the
    gradient and the parameter whose it is."""
    lines = [
        "forward:",
        *(f"s{i} = state()  # u8[{each * n}] | makes s{i}:{each * n}" for i, n in enumerate(SIZES)),
        *(f"w{i} = parameter()  # u8[{n}] | makes w{i}:{n}" for i, n in enumerate(SIZES)),
        "y0 = input()  # u8[100] | makes y0:100",
        "d = tangent()  # u8[100] | makes d:100",
        *(f"y{i + 1} = mm(y{i}, w{i})  # u8[100] | makes y{i + 1}:100 | 10.0 us" for i in range(3)),
        "backward:",
        "g3 = mul(d, y3)  # u8[100] | makes g3:100 | 1.0 us",
    ]
    for i in reversed(range(3)):
        lines.append(f"g{i} = mm(g{i + 1}, w{i})  # u8[100] | makes g{i}:100 | 10.0 us")
        lines.append(f"e{i} = mm(g{i + 1}, y{i})  # u8[{SIZES[i]}] | makes e{i}:{SIZES[i]} | 10.0 us")
    lines.append("update:")
    lines.append("step = Adam.step(s0, e0, w0, s1, e1, w1, s2, e2, w2)  # 20.0 us | workspace 50")
    return parse("\n".join([*lines, "return output y3, gradient e0, gradient e1, gradient e2"]))


TRACE = trace_of(2)
MACHINE = Machine(
    0, link=Link(out=10.0, back=10.0), streaming=Streaming(enabled=True, window=50, host_update_rate=100.0)
)
GAPS = ReuseGaps(TRACE)
STATES = tuple(f"s{i}" for i in range(3))


@pytest.fixture(autouse=True)
def _small_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "SMALLEST_STREAMED", 1)
    monkeypatch.setattr(state_vars, "SMALLEST_STREAMED", 1)


def plan_of(far: set[str], machine: Machine = MACHINE) -> Plan:
    return schedule(GAPS, dict.fromkeys(sorted(far), Placement.OFFLOAD_BLOCKING), machine)


def update_us(plan: Plan, machine: Machine = MACHINE) -> float:
    """Return the total time of the update."""
    forecast = predict(apply(TRACE, plan), machine)
    return forecast.us - forecast.begins[-1]


def traffic(plan: Plan) -> tuple[int, int]:
    trace = apply(TRACE, plan)
    return update_nbytes(trace, trace.ops[-1]).get("", (0, 0))


def test_who_has_the_parameter_and_the_gradient_decides_what_is_copied() -> None:
    there = (Stream("s0", on="host"),)
    gone = Offload("e0", out="e0", free="e0")
    assert traffic((Stream("s0"),)) == (2000, 2000)
    assert traffic(there) == (1000, 2000)  # both come to the host, and new bytes go back
    assert traffic((*there, gone)) == (1000, 1000)
    assert traffic((*there, gone, Stream("w0"))) == (0, 0)
    assert traffic((Stream("s0"), gone, Stream("w0"))) == (4000, 3000)
    assert traffic((*there, Stream("s1"))) == (3000, 4000)  # what belongs to s1 stays on the device


def test_the_update_takes_as_long_as_the_longest_of_device_links_and_host() -> None:
    there = (Stream("s0", on="host"), Stream("w0"), Offload("e0", out="e0", free="e0"))
    assert update_us(there) == 20.0
    assert update_us(there, replace(MACHINE, streaming=replace(MACHINE.streaming, host_update_rate=50.0))) == 40.0
    assert update_us((Stream("s0", on="host"),)) == 300.0
    assert predict(apply(TRACE, there), MACHINE).peak == predict(apply(TRACE, (Stream("s0"), *there[1:])), MACHINE).peak


@pytest.mark.parametrize(
    ("stepping", "found"),
    [(0.0, set()), (0.5, set()), (1.0, {"s0"}), (2.0, {"s0", "s1"}), (100.0, {"s0", "s1", "s2"})],
)
def test_the_slower_the_host_the_less_it_updates(stepping: float, found: set[str]) -> None:
    everything = {*STATES, *(f"w{i}" for i in range(3)), *(f"e{i}" for i in range(3))}
    assert (
        host_updated_states(
            TRACE, replace(MACHINE, streaming=replace(MACHINE.streaming, host_update_rate=stepping)), everything
        )
        == found
    )


def test_what_has_more_to_bring_there_than_it_spares_stays_on_the_device() -> None:
    momentum = trace_of(1)
    assert host_updated_states(momentum, MACHINE, set(STATES)) == set()
    assert host_updated_states(momentum, MACHINE, {*STATES, "w1", "e1"}) == {"s1"}
    assert host_updated_states(momentum, MACHINE, {"w0", "e0"}) == set()


@given(
    st.sets(st.sampled_from([f"{kind}{i}" for kind in "swe" for i in range(3)])),
    st.sampled_from((0.5, 5.0, 20.0, 300.0)),
    st.sampled_from((1.0, 10.0, 80.0)),
    st.sampled_from((1.0, 10.0, 80.0)),
)
def test_it_is_never_longer_than_on_the_device(far: set[str], stepping: float, out: float, back: float) -> None:
    machine = replace(
        MACHINE,
        streaming=replace(MACHINE.streaming, host_update_rate=stepping),
        link=replace(MACHINE.link, out=out, back=back),
    )
    plan = plan_of(far, machine)
    plain = tuple(replace(decision, on="") if isinstance(decision, Stream) else decision for decision in plan)
    check(apply(TRACE, plan))
    assert update_us(plan, machine) <= update_us(plain, machine)
    assert predict(apply(TRACE, plan), machine).peak == predict(apply(TRACE, plain), machine).peak


@pytest.mark.long
def test_plans_are_nearer_to_what_is_proven_and_faster_with_a_host() -> None:
    lines = []
    for budget in (15_000, 9_000, 5_000):
        for stepping in (0.0, 15.0, 100.0):
            machine = replace(MACHINE, budget=budget, streaming=replace(MACHINE.streaming, host_update_rate=stepping))
            choice = make_plan(TRACE, machine)
            there = [said.value for said in choice.plan if isinstance(said, Stream) and said.on]
            lines.append(
                f"{budget}, {stepping:.0f}: plan {choice.forecast.us:.0f} us, {choice.lower_bound:.0f} proven, "
                f"{', '.join(sorted(there)) or 'nothing'} there"
            )
            assert choice.forecast.peak <= budget
    assert_expected_inline(
        "\n".join(lines),
        """\
15000, 0: plan 1291 us, 1291 proven, nothing there
15000, 15: plan 548 us, 510 proven, s0, s1 there
15000, 100: plan 461 us, 451 proven, s0, s1 there
9000, 0: plan 2571 us, 2551 proven, nothing there
9000, 15: plan 1004 us, 928 proven, s1, s2 there
9000, 100: plan 831 us, 821 proven, s0, s2 there
5000, 0: plan 3871 us, 3741 proven, nothing there
5000, 15: plan 1438 us, 1155 proven, s0, s1, s2 there
5000, 100: plan 1051 us, 1021 proven, s0, s1, s2 there""",
    )


def test_it_prints_and_parses_back() -> None:
    plan = parse_plan("stream s0: on host\nstream s1")
    assert plan == (Stream("s0", on="host"), Stream("s1"))
    assert "\n".join(map(str, plan)) == "stream s0: on host\nstream s1"
    trace = apply(TRACE, plan)
    assert str(trace.op["s0"]) == "s0 = state()  # u8[2000] | makes s0:0 | offloaded | on_host"
    assert parse(str(trace)) == trace
    assert str(MACHINE) == "cpu 0 bytes, disk 10/10 MB/s, updates states at 100 MB/s"


def test_nothing_but_states_is_updated_there_and_nowhere_else() -> None:
    with pytest.raises(BrokenTrace, match="w0 is updated on the host, but is no offloaded state"):
        check(apply(TRACE, (Stream("w0", on="host"),)))
    with pytest.raises(ValueError, match="states are updated on the device or on 'host'"):
        apply(TRACE, (Stream("s0", on="mars"),))
