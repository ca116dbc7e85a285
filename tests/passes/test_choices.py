"""Each choice for a value has a bound that no plan with it goes below, or the reason why there is no such plan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from passes import BudgetError, Link, Machine, Streaming, Trace, apply, make_plan, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.choices import choices, named_values
from passes.lp import problem
from passes.schedule.schedule import Placement
from passes.search.greedy import greedy_plan
from tests.oracle.exhaustive import Choices, all_fates, best_of, keep_or_recompute
from tests.support.strategies import machines, traces

MIB = 1 << 20
STEP = parse("""
    forward:
    w = parameter()  # u8[2097152] | makes w:2097152 | at layers.0.weight
    x = input()  # u8[1048576] | makes x:1048576
    d = tangent()  # u8[4] | makes d:4
    a = mm(x, w)  # u8[4194304] | makes a:4194304 | 900.0 us | at layers.0 model.py:7
    b = gelu(a)  # u8[4194304] | makes b:4194304 | 30.0 us | at layers.1 model.py:8
    c = dropout(b)  # u8[4194304] | makes c:4194304 | once | 30.0 us | at layers.2 model.py:9
    s = sum(c)  # u8[1024] | makes s:1024 | 30.0 us | at head model.py:10
    o = exp(s)  # u8[4] | makes o:4 | 1.0 us | at head model.py:10
    backward:
    e = big(d, s)  # u8[4194304] | makes e:4194304 | 100.0 us | workspace 4194304 | at head model.py:10
    f = dropout_backward(e, c)  # u8[4194304] | makes f:4194304 | 100.0 us | at layers.2 model.py:9
    g = gelu_backward(f, a, b)  # u8[4194304] | makes g:4194304 | 100.0 us | at layers.1 model.py:8
    r = mm_backward(g, x)  # u8[2097152] | makes r:2097152 | 100.0 us | at layers.0 model.py:7
    return output o, gradient r
""")
PLACED = {"keep": Placement.KEEP, "recompute": Placement.RECOMPUTE, "offload": Placement.OFFLOAD}


def table(trace: Trace, machine: Machine, *values: str) -> str:
    """Return the choices for some values."""
    result, lines = make_plan(trace, machine), []
    for value in values:
        for each in choices(result, machine, value):
            least = f"{each.least_us:.1f} us" if math.isfinite(each.least_us) else each.why_not
            lines.append(f"{value}: {each.kind}{' (taken)' if each.taken else ''}: {least}")
    return "\n".join(lines) + "\n"


def test_a_choice_has_the_least_time_of_a_step_with_it_or_the_row_that_forbids_it() -> None:
    assert_expected_inline(
        table(STEP, Machine(20 * MIB), "a", "b", "c"),
        """\
a: keep (taken): 1413.5 us
a: recompute: 2291.0 us
a: offload: nothing can be offloaded: the plan has no tier, or its copies were not measured
b: recompute (taken): 1421.0 us
b: keep: 2066.2 us
b: offload: nothing can be offloaded: the plan has no tier, or its copies were not measured
c: keep (taken): 1413.5 us
c: recompute: c may run only once
c: offload: nothing can be offloaded: the plan has no tier, or its copies were not measured
""",
    )


def test_what_is_copied_is_compared_with_what_is_recomputed() -> None:
    machine = Machine(20 * MIB, link=Link(out=50_000.0, back=50_000.0, capacity=1 << 40))
    assert_expected_inline(
        table(STEP, machine, "a", "b", "s"),
        """\
a: keep (taken): 1402.4 us
a: recompute: 2291.0 us
a: offload: 1413.9 us
b: recompute (taken): 1421.0 us
b: keep: 1392.9 us
b: offload: 1443.9 us
s: keep (taken): 1391.7 us
s: recompute: 1421.7 us
s: offload: it has 1024 bytes, and a copy of fewer than 65536 does not pay
""",
    )


@pytest.mark.parametrize(
    "value, why",
    [
        ("x", "an input of the step"),
        ("w", "no tier, or its copies were not measured"),
        ("o", "the step returns it"),
        ("g", "backward makes it and uses it up"),
        ("d", "a tangent of the step"),
    ],
)
def test_what_nothing_is_decided_of_is_said_with_the_reason(value: str, why: str) -> None:
    machine = Machine(20 * MIB)
    with pytest.raises(ValueError, match=f"nothing is decided of '{value}': .*{why}"):
        choices(make_plan(STEP, machine), machine, value)


def test_a_parameter_is_kept_or_offloaded() -> None:
    machine = Machine(
        20 * MIB, link=Link(out=50_000.0, back=50_000.0, capacity=1 << 40), streaming=Streaming(True, window=1 << 16)
    )
    found = choices(make_plan(STEP, machine), machine, "w")
    assert {each.kind for each in found} == {"keep", "offload"}


def test_a_value_is_found_by_its_name_or_by_the_path_of_its_submodule() -> None:
    assert named_values(STEP, "b") == ["b"]
    assert named_values(STEP, "layers.1") == ["b"]
    assert named_values(STEP, "layers") == ["a", "b", "c", "w"]
    assert named_values(STEP, "head") == ["s", "o"]
    assert named_values(STEP, "layers.0.weight") == ["w"]
    assert named_values(STEP, "b__2") == ["b"]  # that of the planned step
    with pytest.raises(ValueError, match=r"no value 'layers.3'.*near to it are .*'layers.0'"):
        named_values(STEP, "layers.3")


def test_an_unknown_choice_is_refused_with_those_there_are() -> None:
    machine = Machine(20 * MIB)
    with pytest.raises(ValueError, match="no choice 'swap'; give one of 'keep', 'recompute', 'offload'"):
        choices(make_plan(STEP, machine), machine, "b", "swap")


@pytest.fixture
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of a few bytes be offloaded."""
    monkeypatch.setattr(problem, "SMALLEST_OFFLOAD", 1)


@st.composite
def pressed(draw: st.DrawFn) -> tuple[Trace, Machine]:
    """A small step, and a machine whose budget it exceeds."""
    trace, machine = draw(traces(max_forward=5)), draw(machines())
    assume(1 <= len(ReuseGaps(trace).producer) <= 5)
    top = predict(trace, machine).peak
    least = predict(apply(trace, greedy_plan(trace, replace(machine, budget=1))), machine).peak
    assume(least < top)
    return trace, replace(machine, budget=top - (top - least) * draw(st.integers(1, 10)) // 10)


@pytest.mark.long
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(pressed())
@pytest.mark.usefixtures("small_copies")
def test_no_plan_with_a_choice_is_faster_than_its_bound(case: tuple[Trace, Machine]) -> None:
    """Every plan is tried that keeps, recomputes or offloads each value once."""
    trace, machine = case
    try:
        result = make_plan(trace, machine)
    except BudgetError:
        assume(False)
    gaps = ReuseGaps(trace)
    once = {name: [way for way in ways if way in PLACED.values()] for name, ways in fates(gaps, machine).items()}
    for storage in gaps.uses:
        value = gaps.whole_value.get(storage)
        try:
            found = choices(result, machine, value or "")
        except (KeyError, ValueError):
            continue
        assert found[0].taken and found[0].least_us <= result.forecast.us * (1 + 1e-9) + 1e-6
        for each in found:
            assert (each.least_us == math.inf) == bool(each.why_not)
            if (way := PLACED.get(each.kind)) in once[storage]:
                best = best_of(gaps, {**once, storage: [way]}, machine)
                assert best is None or each.least_us <= result.captured.us + best[0] + 1e-6


def fates(gaps: ReuseGaps, machine: Machine) -> Choices:
    return all_fates(gaps, machine) if machine.link.works else keep_or_recompute(gaps)
