"""Copies begin when the link is ready and there is room, in the order of their uses, and what has room to stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import Link, Machine, Plan, Streaming, Trace, apply, check, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp.linear_program import INFINITY
from passes.schedule import copy_timing
from passes.schedule.copy_timing import retime_copies
from passes.schedule.schedule import Placement, schedule
from passes.simulate.forecast import Forecast
from tests.support.layered_traces import step
from tests.support.strategies import LINKS, legal_fates, machines, traces

STEP = step("u", "v", "w")
GAPS = ReuseGaps(STEP)
FATES: dict[str, Placement] = dict.fromkeys(("u", "v", "w", "du", "dv", "dw"), Placement.STREAM)
MACHINE = Machine(0, link=Link(out=10.0, back=10.0, half_duplex=True), streaming=Streaming(enabled=True))


def timed(machine: Machine) -> tuple[Plan, Plan]:
    plan = schedule(GAPS, FATES, machine)
    return plan, retime_copies(GAPS, machine, plan, predict(apply(STEP, plan), machine))[0]


def shown(machine: Machine) -> str:
    plan, found = timed(machine)
    before, after = (predict(apply(STEP, each), machine) for each in (plan, found))
    return "\n".join([f"{before} -> {after}", *map(str, found[3:])])


def test_with_room_copies_run_ahead() -> None:
    assert_expected_inline(
        shown(replace(MACHINE, budget=10_000)),
        """\
700 bytes at dw, 100 us -> 700 bytes at dw, 100 us
reload u: back a, use a
reload v: back a, use b
reload w: back b, use c
reload w: back dw, use p
reload v: back dv, use q
reload u: back du, use r
offload dw: out dw, free p
offload dv: out dv, free q
offload du: out du, free r""",
    )


def test_without_room_compute_waits_for_copies() -> None:
    least = min(predict(apply(STEP, timed(replace(MACHINE, budget=0))[1]), MACHINE).peak, 10_000)
    assert_expected_inline(
        shown(replace(MACHINE, budget=least)),
        """\
700 bytes at dw, 100 us -> 600 bytes at dw, 150 us
reload u: back a, use a
reload v: back a, use b
reload w: back b, use c
reload w: back p, use p
reload v: back q, use q
reload u: back du, use r
offload dw: out dw, free dw
offload dv: out dv, free dv
offload du: out du, free du""",
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.sampled_from([1.0, 10.0, 300.0]), st.booleans())
def test_copies_that_are_timed_fit_wherever_copies_that_wait_do(budget: int, rate: float, turns: bool) -> None:
    machine = replace(MACHINE, budget=budget, link=replace(MACHINE.link, out=rate, back=rate, half_duplex=turns))
    waiting = schedule(GAPS, dict.fromkeys(FATES, Placement.OFFLOAD_BLOCKING), machine)
    late, (plan, found) = predict(apply(STEP, waiting), machine), timed(machine)
    after, before = (predict(apply(STEP, each), machine) for each in (found, plan))
    check(after.trace)
    assert after.peak <= max(budget, late.peak)
    assert after.us <= before.us or before.peak > budget


def test_without_time_copies_are_timed_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = list[Trace]()

    def predicted(trace: Trace, machine: Machine) -> Forecast:
        simulated.append(trace)
        return predict(trace, machine)

    monkeypatch.setattr(copy_timing, "predict", predicted)
    machine = replace(MACHINE, budget=1000)
    plan = schedule(GAPS, FATES, machine)
    forecast, count = predict(apply(STEP, plan), machine), list[int]()
    for until in (-1.0, INFINITY):
        simulated.clear()
        retime_copies(GAPS, machine, plan, forecast, until)
        count.append(len(simulated))
    assert count == [3, 6]


@given(traces(max_forward=10), machines(LINKS[1:], ("bf16",)), st.floats(0.0, 1.0), st.data())
def test_the_bytes_with_which_a_plan_was_found_are_enough(
    trace: Trace, machine: Machine, share: float, data: st.DataObject
) -> None:
    gaps = ReuseGaps(trace)
    plan = schedule(gaps, data.draw(legal_fates(gaps, machine.cast.dtype)), machine)
    forecast = predict(apply(trace, plan), machine)
    machine = replace(machine, budget=int(forecast.peak * share))
    found = replace(machine, budget=retime_copies(gaps, machine, plan, forecast)[1].peak)
    assert retime_copies(gaps, found, plan, forecast)[1].peak <= found.budget
