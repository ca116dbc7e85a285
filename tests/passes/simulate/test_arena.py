"""Each storage of a step has an address, no two that are live at once overlap, and little is lost between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from hypothesis import given

from passes import Forecast, Link, Machine, Trace, apply, make_plan, parse, predict
from passes.simulate.arena import ALIGNMENT, Arena, allocated, place
from tests.support.strategies import machines, planned

GOLDEN = Path(__file__).parents[3] / "benchmarks" / "golden"
STEP = parse("""
    forward:
    w = parameter()  # makes w:50
    a = relu(w)  # u8[4] | makes a:4 | 10.0 us
    b = mm(a)  # u8[2] | makes b:2 | 10.0 us
    c = mm(b)  # u8[2] | makes c:2 | 10.0 us | workspace 3
    backward:
    g = mul(c, a)  # u8[2] | makes g:2 | 10.0 us
    return gradient g
""")


def lines_of(arena: Arena) -> str:
    slots = sorted(arena.slots, key=lambda slot: slot.first)
    return "".join(f"{slot.name}: {slot.address} to {slot.end}, ops {slot.first} to {slot.last}\n" for slot in slots)


def test_storages_and_workspaces_have_addresses_and_inputs_have_none() -> None:
    arena = place(allocated(predict(STEP, Machine(0)), 1))
    assert_expected_inline(
        lines_of(arena) + f"block {arena.nbytes}, live {arena.live}, lost {arena.lost}\n",
        """\
a: 0 to 4, ops 1 to 4
b: 4 to 6, ops 2 to 3
c: 6 to 8, ops 3 to 4
workspace of c: 8 to 11, ops 3 to 3
g: 4 to 6, ops 4 to 4
block 11, live 11, lost 0
""",
    )


@given(planned(), machines())
def test_no_two_live_storages_overlap(step: tuple[Trace, tuple[object, ...]], machine: Machine) -> None:
    """And the block has all bytes that the forecast counts beside inputs, with windows and staging."""
    trace, plan = step
    forecast = predict(apply(trace, plan), machine)  # type: ignore[arg-type]
    arena = place(allocated(forecast, 1), rounds=5)
    arena.check()
    assert all(slot.address >= 0 for slot in arena.slots)
    assert arena.live <= arena.nbytes and arena.live == most_allocated(forecast)
    aligned = place(allocated(forecast, ALIGNMENT), rounds=0)
    aligned.check()
    assert all(slot.address % ALIGNMENT == slot.nbytes % ALIGNMENT == 0 for slot in aligned.slots)


def most_allocated(forecast: Forecast) -> int:
    """Return the forecast's peak without inputs."""
    total = forecast.total.copy()
    for life in forecast.lifetimes:
        if forecast.trace.op[life.producer].is_input:
            total[life.first : life.last + 1] -= life.nbytes
    return int(total.max(initial=0))


def test_storages_that_overlap_are_found() -> None:
    arena = place(allocated(predict(STEP, Machine(0)), ALIGNMENT))
    moved = tuple(replace(slot, address=0) for slot in arena.slots)
    with pytest.raises(ValueError, match=r"Slot\(name='a', .* are live at one op, and overlap"):
        Arena(moved).check()


def test_an_address_is_taken_again_once_it_is_free() -> None:
    arena = place(allocated(predict(STEP, Machine(0)), 1))
    late = {slot.name: slot for slot in arena.slots}
    assert late["g"].address < late["b"].end and arena.nbytes < sum(slot.nbytes for slot in arena.slots)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", "llama", "unet"])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.4])
def test_at_most_a_hundredth_of_the_peak_is_lost(name: str, share: float) -> None:
    trace = parse((GOLDEN / f"{name}.txt").read_text())
    plain = predict(trace, Machine(1 << 60))
    forecast = plain
    if share < 1:
        machine = Machine(
            plain.peak - int((1 - share) * most_allocated(plain)), link=Link(out=22e3, back=22e3, capacity=1 << 50)
        )
        forecast = make_plan(trace, machine, seconds=0.5).forecast
    arena = place(allocated(forecast, ALIGNMENT))
    arena.check()
    assert arena.lost <= 0.01 * forecast.peak
