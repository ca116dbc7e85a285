"""Several tiers: which value goes where, what copies to each take, and what is proven."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from passes import Link, Machine, Offload, Reload, Stream, apply, make_plan, parse, parse_plan, predict
from passes.ir.machine import Tier, rates, with_rates
from passes.schedule.tier_choice import place_values, tier_nbytes, with_held_tiers
from passes.simulate.forecast import update_nbytes

PAGE = 4096
TRACE = parse("""
    forward:
    s = state()  # f32[2048] | makes s:8192
    w = parameter()  # f32[1024] | makes w:4096
    x = input()  # f32[1024] | makes x:4096
    a = f(x, w)  # f32[1024] | makes a:4096 | 10.0 us | once
    b = f(a)  # f32[1024] | makes b:4096 | 10.0 us
    c = f(b)  # f32[1024] | makes c:4096 | 10.0 us
    d = tangent()  # f32[1024] | makes d:4096
    backward:
    e = g(d, c)  # f32[1024] | makes e:4096 | 10.0 us
    h = g(e, b)  # f32[1024] | makes h:4096 | 10.0 us
    i = g(h, a)  # f32[1024] | makes i:4096 | 10.0 us
    update:
    u = SGD.step(s, i, w)  # 5.0 us
    return gradient i
""")
PLAN = (Stream("s"), Offload("a", "a", "b"), Reload("a", "h", "i"))
NEAR, FAR = Link(1000.0, 1000.0, capacity=2 * PAGE), Link(100.0, 50.0, half_duplex=True)
MACHINE = Machine(1 << 20, tier="host", link=NEAR, behind=(Tier("disk", FAR),))


def test_a_decision_and_an_op_name_a_tier_behind_the_nearest() -> None:
    plan = (Stream("s", to="disk"), Offload("a", "a", "b", to="disk"), PLAN[2])
    assert_expected_inline(
        "\n".join(map(str, plan)),
        """\
stream s: to disk
offload a: out a, free b, to disk
reload a: back h, use i""",
    )
    assert parse_plan("\n".join(map(str, plan))) == plan
    applied = apply(TRACE, plan)
    assert parse(str(applied)) == applied
    assert [op.name for op in applied.ops if op.tier] == ["s", "a__out"]


def test_what_is_copied_most_often_goes_to_the_nearest_tier_that_has_room() -> None:
    placed = place_values(PLAN, TRACE, MACHINE)
    assert placed == (Stream("s"), Offload("a", "a", "b", to="disk"), PLAN[2])
    assert tier_nbytes(placed, TRACE) == {"": 2 * PAGE, "disk": PAGE}
    large = replace(MACHINE, link=replace(NEAR, capacity=3 * PAGE))
    assert place_values(PLAN, TRACE, large) == PLAN
    small = replace(MACHINE, link=replace(NEAR, capacity=2 * PAGE - 1))
    assert place_values(PLAN, TRACE, small) == (Stream("s", to="disk"), *PLAN[1:])


def test_what_is_on_a_tier_stays_there() -> None:
    """A plan that takes the place of another finds parameters and states where that one has put them."""
    first = (Stream("s", to="disk"), Offload("a", "a", "b"), PLAN[2])
    held = with_held_tiers(TRACE, first, MACHINE)
    assert [op.name for op in held.ops if op.tier] == ["s"] and parse(str(held)) == held
    assert place_values(PLAN, held, MACHINE) == first
    near = with_held_tiers(TRACE, (Stream("s"), Stream("w", to="disk")), MACHINE)
    assert {op.name: op.tier for op in near.ops if op.tier} == {"s": "host", "w": "disk"}
    small = replace(MACHINE, link=replace(NEAR, capacity=2 * PAGE))
    assert place_values((Stream("s"), Stream("w"), *PLAN[1:]), near, small)[:2] == (Stream("s"), Stream("w", to="disk"))
    assert with_held_tiers(TRACE, first, replace(MACHINE, behind=())) == TRACE


def test_copies_of_each_tier_have_queues_of_their_own() -> None:
    both = (Offload("a", "a", "b"), Reload("a", "e", "i"), Offload("b", "b", "c", to="disk"), Reload("b", "e", "h"))
    copies = {copy.value: (copy.tier, copy.begin, copy.end) for copy in predict(apply(TRACE, both), MACHINE).copies}
    assert copies["a__out"] == ("", 10.0, 10.0 + 4.096)
    assert copies["b__out"] == ("disk", 20.0, 20.0 + 40.96)
    begin = copies["a__in_1"][1]
    assert copies["a__in_1"] == ("", begin, begin + 4.096)
    assert copies["b__in_1"] == ("disk", begin, begin + 81.92)


def test_an_update_takes_as_long_as_its_slowest_tier() -> None:
    plan = (Stream("s"), Stream("w", to="disk"), Reload("w", "x", "a"))
    applied = apply(TRACE, plan)
    assert update_nbytes(applied, applied.op["u"]) == {"": (8192, 8192), "disk": (4096, 4096)}
    forecast = predict(applied, MACHINE)
    took = forecast.us - forecast.begins[-1]
    assert took == pytest.approx(4096 / 50 + 4096 / 100)


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=2, max_size=4))
def test_no_tiers_copy_faster_than_the_joined_link(speeds: list[tuple[int, int]]) -> None:
    """In a time, each link carries any share of what it can in both directions."""
    links = [Link(float(out), float(back), half_duplex=True) for out, back in speeds]
    machine = Machine(0, link=links[0], behind=tuple(Tier(str(i), link) for i, link in enumerate(links[1:])))
    joined = machine.joined.link
    assert machine.joined.tiers == (Tier("disk", joined),) and joined.half_duplex
    for choice in range(1 << len(links)):  # the ends of what is possible: all out, or all back
        out = sum(link.out for i, link in enumerate(links) if choice >> i & 1)
        back = sum(link.back for i, link in enumerate(links) if not choice >> i & 1)
        assert out / joined.out + back / joined.back <= 1 + 1e-9


def test_a_plan_for_several_tiers_is_no_faster_than_what_is_proven() -> None:
    budget = predict(TRACE, MACHINE).peak - PAGE
    found = make_plan(TRACE, replace(MACHINE, budget=budget))
    assert found.forecast.peak <= budget and found.forecast.us >= found.lower_bound
    assert found.forecast.machine.behind == MACHINE.behind
    assert sum(tier_nbytes(found.plan, TRACE).values()) > 0


def test_rates_are_of_all_links() -> None:
    measured = rates(MACHINE)
    assert measured[-4:] == [100.0, 50.0, 0.0, 0.0] and with_rates(MACHINE, measured) == MACHINE
    other = replace(MACHINE, behind=(Tier("disk", replace(FAR, out=7.0)),))
    assert other.nominal == MACHINE.nominal
    assert str(MACHINE) == "cpu 1048576 bytes, host 1000/1000 MB/s, disk 100/50 MB/s"
