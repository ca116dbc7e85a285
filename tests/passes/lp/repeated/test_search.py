"""Equal layers are found, and a few of them stand for all: what is proven so is true of every plan, and the plans fit."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from passes import Machine, Trace, apply, check, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp import model, problem, relax
from passes.lp.repeated import layers, search
from passes.lp.repeated.layers import EqualLayers
from passes.search import optimize
from tests.oracle.exhaustive import cheapest
from tests.oracle.network import layers as network

SMALL = 1e-6  # microseconds: what a solver's tolerance may add


def numbers(trace: Trace, budget: int = 0) -> problem.PlanProblem:
    return problem.PlanProblem(ReuseGaps(trace), Machine(budget))


def between(trace: Trace, share: float) -> problem.PlanProblem:
    """With a budget between what no plan can lower and what is needed if nothing is done."""
    found = numbers(trace)
    least, most = int(found.fixed.max()), found.captured.peak
    return numbers(trace, least + int((most - least) * share))


def test_equal_layers_are_found_on_the_text() -> None:
    found = numbers(network(6))
    layer = layers.find_equal_layers(found, 4)
    assert layer is not None
    assert layer == EqualLayers(first=0, period=5, count=5)
    assert [found.producers[o].value for o in layer.makers(1)] == ["n1", "a1", "b1", "c1", "x2"]


def test_a_layer_that_is_slower_is_not_equal() -> None:
    text = str(network(9)).replace(
        "a7 = linear(y7)  # makes a7:16384 | 40.0 us", "a7 = linear(y7)  # makes a7:16384 | 41.0 us"
    )
    found = layers.find_equal_layers(numbers(parse(text)), 4)
    assert found is not None and found.count == 7


def test_layers_that_read_further_back_are_not_folded() -> None:
    lines = str(network(9)).splitlines()
    far = [
        line.replace(f"add(x{i}, c{i})", f"add(x{i}, c{i}, c{max(0, i - 2)})") for line in lines for i in [_layer(line)]
    ]
    assert layers.find_equal_layers(numbers(parse("\n".join(far))), 4) is None


def _layer(line: str) -> int:
    """Which layer adds in a line, from the third on; 0, if none does."""
    name = line.strip().partition(" = add(x")[0]
    number = int(name[1:]) - 1 if name.startswith("x") and name[1:].isdigit() else 0
    return number if number >= 2 else 0


@st.composite
def repeated(draw: st.DrawFn, outer: int) -> Trace:
    """A step of a few equal layers of one or two ops, of which backward reads some."""
    count, width = draw(st.sampled_from([(4, 1), (5, 1), (4, 2)] if outer == 1 else [(6, 1), (7, 1)]))
    nbytes = draw(st.lists(st.integers(1, 40), min_size=width, max_size=width))
    us = draw(st.lists(st.integers(1, 9), min_size=width, max_size=width))
    reads = draw(st.lists(st.sampled_from(("before", "first", "both")), min_size=width, max_size=width))
    used = [True, *draw(st.lists(st.booleans(), min_size=width - 1, max_size=width - 1))]
    work = draw(st.integers(0, 20))
    head = draw(st.integers(1, 40))
    lines = [
        "forward:",
        "x = input()  # makes x:8",
        "d = tangent()  # makes d:4",
        f"v0 = f(x)  # makes v0:{head} | 2.0 us",
    ]
    for i in range(count):
        names = [f"v{i}", *(f"u{i}_{k}" for k in range(width - 1)), f"v{i + 1}"]
        for k in range(width):
            may = {"before": (names[k],), "first": (names[0],), "both": tuple(dict.fromkeys((names[0], names[k])))}
            lines.append(
                f"{names[k + 1]} = f({', '.join(may[reads[k]])})  # makes {names[k + 1]}:{100 * nbytes[k]} | {us[k]}.0 us"
            )
    lines += [
        f"o = sum(v{count})  # makes o:4 | 2.0 us",
        "backward:",
        f"g{count} = f(d, v{count})  # makes g{count}:400 | 1.0 us",
    ]
    for i in reversed(range(count)):
        values = [f"u{i}_{k}" for k in range(width - 1)] + [f"v{i + 1}"]
        read = [f"g{i + 1}", *(value for value, use in zip(values, used, strict=True) if use)]
        lines.append(f"g{i} = f({', '.join(read)})  # makes g{i}:400 | 3.0 us | workspace {100 * work}")
    trace = parse("\n".join([*lines, "return output o, gradient g0"]))
    check(trace)
    return trace


@pytest.mark.parametrize("outer", [1, 2])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_plan_beats_the_bound_of_folded_layers(outer: int, data: st.DataObject) -> None:
    trace = data.draw(repeated(outer))
    step = between(trace, data.draw(st.floats(0.0, 0.7)))
    found = layers.find_equal_layers(step, 2 * outer + 1)
    assume(found is not None)
    best = cheapest(trace, step.machine.budget)
    assume(best is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "OUTER", outer)
        least = search.lowest(step, found) if found else None
    assume(least is not None)
    assert best is not None and least is not None
    assert least.solved.us <= best + SMALL and least.any_us <= best + SMALL


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_folded_plans_fit_and_are_near(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LONG", 0)
    monkeypatch.setattr(search, "LEAST", 16)
    trace = network(40)
    step = between(trace, share)
    found = search.solve_folded(step)
    assert found is not None and found.gap <= optimize.GAP
    assert predict(apply(trace, found.plan), step.machine).peak <= step.machine.budget
    assert found.plan == optimize.optimize(trace, step.machine).plan


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_the_folded_program_has_the_optimum_of_the_full_one(share: float) -> None:
    step = between(network(40), share)
    found = layers.find_equal_layers(step, 16)
    least = search.lowest(step, found) if found else None
    full = relax.relax(model.PlanModel(step, step.machine.budget))
    assert least is not None and full is not None and full.solution is not None
    assert least.solved.us == pytest.approx(full.solution.us, abs=1e-5 * step.captured.us)
    assert len(least.program.storages) < len(step.storages) / 5


def test_short_steps_are_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LEAST", 16)
    assert search.solve_folded(between(network(40), 0.5)) is None
