"""A value is cast for its way where that pays, and only where it may be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from passes import Cast, Link, Machine, Offload, Reload, Trace, apply, check, make_plan, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.ir import decisions
from passes.ir.machine import cast_type
from passes.lp import problem
from passes.search.greedy import greedy_plan
from passes.search.optimize import optimize

# Before p, a, b and c must be off the device, and each is expensive to recompute.
STEP = parse("""
    forward:
    x = input()  # u8[10] | makes x:10
    d = tangent()  # u8[5] | makes d:5
    a = f(x)  # f32[10000] | makes a:40000 | 900.0 us
    b = f(a)  # f32[10000] | makes b:40000 | 900.0 us
    c = f(b)  # i32[10000] | makes c:40000 | 900.0 us
    q = f(c)  # u8[1] | makes q:1 | 100.0 us
    t = f(q)  # u8[1] | makes t:1 | 100.0 us
    p = big(t)  # u8[1] | makes p:1 | 100.0 us | workspace 130000
    backward:
    e = big(d)  # u8[1] | makes e:1 | 100.0 us
    g = f(e, c)  # u8[10] | makes g:10 | 100.0 us
    h = f(g, b)  # u8[10] | makes h:10 | 100.0 us
    i = f(h, a)  # u8[10] | makes i:10 | 100.0 us
    return output p, gradient i
""")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "SMALLEST_OFFLOAD", 1)
    monkeypatch.setattr(decisions, "CAST_WORKSPACE", 0)


def machine(rate: float, wire: str = "bf16", cast: float = 4000.0) -> Machine:
    return Machine(140_000, link=Link(out=rate, back=rate), cast=Cast(dtype=wire, out=cast, back=cast))


def sent(trace: Trace, machine: Machine) -> dict[str, str]:
    """Return the values that the plan offloads, each with the dtype it is cast to."""
    return {d.value: d.wire for d in make_plan(trace, machine).plan if isinstance(d, Offload)}


def test_a_link_that_hides_everything_casts_nothing() -> None:
    assert sent(STEP, machine(4000.0)) == {"a": "", "b": "", "c": ""}


def test_a_slow_link_casts_what_may_be_cast() -> None:
    """c may not be cast, and is recomputed."""
    assert sent(STEP, machine(80.0)) == {"a": "bf16", "b": "bf16"}


def test_a_cast_that_takes_longer_than_it_spares_is_left_alone() -> None:
    assert "bf16" not in sent(STEP, machine(80.0, cast=1.0)).values()


@pytest.mark.parametrize("rate", [4000.0, 80.0, 10.0])
def test_nothing_is_cast_unless_the_machine_says_so(rate: float) -> None:
    assert "bf16" not in sent(STEP, machine(rate, wire="")).values()


def test_what_is_cast_takes_half_the_bytes_on_its_way_and_its_own_are_gone_at_once() -> None:
    plan = (Offload("a", out="b", free="q", wire="bf16"), Reload("a", back="e", use="i"))
    applied = apply(STEP, plan)
    check(applied)
    forecast = predict(applied, machine(80.0))
    a, wire, rest = 40_000, 20_000, 80_000  # of b and c
    held = {
        op.name: sum(life.nbytes for life in forecast.live_at(i) if life.nbytes >= wire)
        for i, op in enumerate(applied.ops)
        if op.name.startswith(("a", "b", "c", "q", "t", "h", "i"))
    }
    assert held == {
        "a": a, "b": a + 40_000, "a__wire": a + wire + 40_000, "a__out": wire + 40_000, "c": wire + rest, "q": wire + rest,
        "a__free": wire + rest, "t": rest, "a__in_1": rest + wire, "h": wire + 40_000, "a__back_1": wire,
        "a__wide_1": wire + a, "i": a,
    }  # fmt: skip
    assert [(copy.value, copy.end - copy.begin) for copy in forecast.copies] == [("a__out", 250.0), ("a__in_1", 250.0)]
    assert forecast.us == predict(STEP, machine(80.0)).us + 10.0 + 10.0  # the casts; the copies hide


@pytest.mark.parametrize("rate", [4000.0, 300.0, 80.0, 10.0])
def test_a_plan_that_may_cast_is_no_slower(rate: float) -> None:
    plain, cast = make_plan(STEP, machine(rate, wire="")), make_plan(STEP, machine(rate))
    assert cast.forecast.us <= plain.forecast.us and cast.lower_bound <= cast.forecast.us


def test_the_greedy_pass_casts_as_well() -> None:
    slow = machine(80.0)
    plan = greedy_plan(STEP, slow)
    assert any(isinstance(decision, Offload) and decision.wire for decision in plan)
    assert predict(apply(STEP, plan), slow).peak <= slow.budget
    without = predict(apply(STEP, greedy_plan(STEP, replace(slow, cast=replace(slow.cast, dtype="")))), slow)
    assert predict(apply(STEP, plan), slow).us <= without.us


def test_the_tier_needs_room_for_offloaded_values_only() -> None:
    fast = machine(80.0)
    small = replace(fast, link=replace(fast.link, capacity=80_000))  # 20000 + 20000 + 40000
    plan = greedy_plan(STEP, small)
    assert predict(apply(STEP, plan), small).peak <= small.budget


def test_it_is_the_same_plan_every_time() -> None:
    assert optimize(STEP, machine(80.0)).plan == optimize(parse(str(STEP)), machine(80.0)).plan


@pytest.mark.parametrize(
    ("type", "wire", "found"),
    [
        ("f32[8, 4]", "bf16", "bf16[8, 4]"),
        ("f32[]", "bf16", "bf16[]"),
        ("f32[8], f32[4]", "bf16", ""),
        ("bf16[8]", "bf16", ""),
        ("f16[8]", "bf16", ""),
        ("f64[8]", "bf16", ""),
        ("i64[8]", "bf16", ""),
        ("c64[8]", "bf16", ""),
        ("", "bf16", ""),
        ("f32[8]", "f16", ""),
        ("f32[8]", "", ""),
    ],
)
def test_only_float32_is_cast(type: str, wire: str, found: str) -> None:
    assert cast_type(type, wire) == found


def test_what_a_view_takes_for_another_type_is_not_cast() -> None:
    lines = str(STEP).replace("q = f(c)", "v = view(a)  # TYPE[10000] | holds a\nq = f(c)")
    for type, nbytes in (("i32", 0), ("c64", 0), ("f32", 20_000), ("f32[2], f32", 20_000), ("f32[2], i32", 0)):
        assert ReuseGaps(parse(lines.replace("TYPE", type))).wire_nbytes("a", "bf16") == nbytes


def test_a_storage_that_no_value_is_all_of_is_not_cast() -> None:
    piece = replace(STEP, ops=tuple(replace(op, type="f32[9]") if op.name == "a" else op for op in STEP.ops))
    assert "a" not in ReuseGaps(piece).whole_value
    assert "a" not in sent(piece, machine(80.0))
