"""A sweep says what each budget costs, and the curve makes sense."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memgraph
from memgraph import Point, Sweep
from memgraph.api.budget_sweep import POINTS
from memgraph.command.planning import unplanned
from memgraph.profile import op_profiler
from memgraph.profile.op_cost import OpCost
from memgraph.profile.op_profiler import nominal_us
from memgraph.report.budget_curve import point_of_refusal
from passes import make_plan
from tests.support.models import batch, net

measured = op_profiler._measure


@pytest.fixture(scope="module", autouse=True)
def _nominal_prices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Price ops at guessed rates: at prices of a busy machine another budget may get a smaller plan by chance."""

    def nominal(node: fx.Node, timer: Any) -> OpCost | None:
        found = measured(node, timer)
        return found and replace(found, cost=replace(found.cost, us=nominal_us(node)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMGRAPH_CACHE", str(tmp_path_factory.mktemp("costs")))
        patch.setattr(op_profiler, "_known", {})
        patch.setattr(op_profiler, "_measure", nominal)
        yield


@cache
def swept() -> Sweep:
    return memgraph.sweep(net(), batch(), offload=None, time_limit=0)


@cache
def searched() -> Sweep:
    """With the whole planner and a far tier."""
    return memgraph.sweep(net(), batch(), budgets=[swept().needs - 60_000, swept().needs])


def test_it_goes_from_what_the_step_needs_to_the_least_there_is() -> None:
    budgets = [point.budget for point in swept().points]
    assert budgets[0] == swept().needs == memgraph.plan(net(), batch(), budget="1GB").peak
    assert budgets[-1] == swept().smallest < swept().needs
    assert budgets == sorted(set(budgets), reverse=True)
    assert len(budgets) == POINTS + 2
    steps = [large - small for large, small in pairwise(budgets)]
    assert max(steps) - min(steps) <= 1


def test_all_commands_give_one_time_for_the_step_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(op_profiler, "_known", {})  # so that ops are priced here
    monkeypatch.setattr(op_profiler, "_measure", measured)
    explained = unplanned(net(), batch()).choice.captured
    asked = memgraph.sweep(net(), batch(), offload=None, time_limit=0, budgets=["1GB"])
    needs_a_plan = memgraph.plan(net(), batch(), budget=explained.peak - 60_000, offload=None, time_limit=0)
    assert explained.us == asked.plain_us == needs_a_plan.choice.captured.us
    assert "goes beyond the budget" not in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("of", [swept, searched])
def test_less_memory_never_takes_less_time(of: Any) -> None:
    points = [point for point in of().points if point.fits]
    assert len(points) > 1
    for large, small in pairwise(points):
        assert small.us >= large.us
    for point in points:
        assert point.peak <= point.budget
        assert point.lower_bound <= point.us
        assert point.us == pytest.approx(of().plain_us * (1 + point.overhead))
        assert point.us == pytest.approx(point.lower_bound * (1 + point.gap))
        assert point.kept + point.recomputed + point.offloaded == pytest.approx(1.0)


def test_what_needs_nothing_has_no_decisions_and_keeps_all() -> None:
    first = searched().points[0]
    assert (first.us, first.decisions, first.kept, first.overhead) == (searched().plain_us, 0, 1.0, 0.0)
    assert searched().points[-1].decisions > 0
    assert searched().points[-1].kept < 1


@pytest.mark.long
def test_the_smallest_budget_works_and_a_byte_less_is_a_point_that_does_not_fit() -> None:
    smallest = swept().smallest
    memgraph.plan(net(), batch(), budget=smallest, offload=None, time_limit=0)
    sweep = memgraph.sweep(net(), batch(), budgets=[smallest - 1, smallest], offload=None, time_limit=0)
    fits, over = sweep.points
    assert fits.fits and fits.budget == sweep.smallest == smallest
    assert not over.fits
    assert (over.budget, over.peak, over.us, over.gap) == (smallest - 1, smallest, math.inf, math.inf)
    assert "does not fit" in str(sweep)


def test_if_nothing_fits_there_is_no_knee_but_still_a_smallest_budget() -> None:
    sweep = memgraph.sweep(net(), batch(), budgets=[100, "1KB"], offload=None, time_limit=0)
    assert [point.fits for point in sweep.points] == [False, False]
    assert sweep.knee is None
    assert sweep.smallest == swept().smallest
    assert json.loads(sweep.to_json())["knee"] is None
    assert str(sweep).count("does not fit") == 2


def point(budget: int, us: float) -> Point:
    return Point(budget, budget, us, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("times", "knee"),
    [
        ([10, 10, 11, 40, 60], 3),  # bends at the third
        ([10, 11, 12, 13, 30], 4),
        ([10, 20, 30, 40, 50], 5),  # bends nowhere
        ([10, 30, 40, 45, 50], 5),  # bends the other way
        ([10, 10, 10, 10, 10], 5),  # the smallest costs nothing
        ([10, 40], 2),
        ([10], 1),
    ],
)
def test_the_knee_is_furthest_below_the_chord(times: list[float], knee: int) -> None:
    points = tuple(point(100 - 10 * i, us) for i, us in enumerate(times))
    sweep = Sweep((*points, point_of_refusal(5, 50, 10.0)), 50, 100, 10.0)
    assert sweep.knee == points[knee - 1]


def test_a_plan_for_less_takes_the_place_of_a_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    room = sys.modules["memgraph.api.budget_sweep"]  # memgraph.sweep is the function
    half = (swept().smallest + swept().needs) // 2

    def worse(trace: Any, machine: Any, **options: Any) -> Any:
        """A planner whose plans for more memory than half are slow, and which finds none just below the top."""
        if machine.budget == swept().needs - 1:
            raise memgraph.BudgetError("none", machine.budget, machine.budget + 1)
        choice = make_plan(trace, machine, **options)
        if half <= machine.budget < swept().needs:
            return replace(choice, forecast=replace(choice.forecast, us=choice.forecast.us * 9), bound_us=1.0)
        return replace(choice, bound_us=3.0)

    monkeypatch.setattr(room, "make_plan", worse)
    budgets = [half - 1, half, swept().needs - 1]
    first, middle, last = memgraph.sweep(net(), batch(), budgets=budgets, offload=None, time_limit=0).points
    assert first.us == middle.us == last.us
    assert first.decisions == middle.decisions == last.decisions
    # What was proven for less does not hold for more.
    assert [round(one.lower_bound - swept().plain_us) for one in (first, middle, last)] == [0, 1, 3]


def test_as_data_it_is_json_and_frozen() -> None:
    facts = json.loads(swept().to_json())
    assert (facts["smallest"], facts["needs"], facts["plain_us"]) == (
        swept().smallest,
        swept().needs,
        swept().plain_us,
    )
    knee = swept().knee
    assert knee is not None and facts["knee"] == knee.budget
    assert [Point(**known) for known in facts["points"]] == list(swept().points)
    with pytest.raises(AttributeError):
        swept().smallest = 0  # type: ignore[misc]


def test_as_a_table_it_has_a_line_a_point() -> None:
    lines = str(swept()).splitlines()
    assert lines[0].startswith("as it is, the step needs ")
    assert lines[1].split()[:4] == ["budget", "forecast", "step", "overhead"]
    assert len(lines) == 2 + len(swept().points)
    assert sum(line.endswith("knee") for line in lines) == 1
    assert sum(line.endswith("smallest") for line in lines) == 1


@pytest.mark.long
def test_it_counts_the_optimizer_and_takes_keyword_arguments_and_a_loss() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, *, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.net(x) * scale

    model = Named()
    optimizer = torch.optim.Adam(model.parameters())
    loss = nn.functional.mse_loss
    options: dict[str, Any] = {"optimizer": optimizer, "loss": loss, "target": batch(), "x": batch(), "scale": 0.5}
    sweep = memgraph.sweep(model, budgets=["1GB"], time_limit=0, **options)
    assert sweep.needs == memgraph.plan(model, budget="1GB", **options).peak > swept().needs
    assert sweep.smallest <= sweep.needs


def test_it_leaves_the_model_as_it_was_and_takes_one_without_a_gradient() -> None:
    model = net()
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.no_grad():
        sweep = memgraph.sweep(model, batch(), time_limit=0)
    assert all(p.grad is None and torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert sweep.points[0].budget == sweep.needs
    assert sweep.knee is not None


def test_a_step_of_one_op_has_a_curve_of_one_point() -> None:
    sweep = memgraph.sweep(nn.ReLU(), batch(), time_limit=0)
    assert [point.budget for point in sweep.points] == [sweep.needs] == [sweep.smallest]
    assert sweep.knee == sweep.points[0]


def test_budgets_are_checked_like_one_budget() -> None:
    with pytest.raises(ValueError, match="budget='8 apples' can't be read"):
        memgraph.sweep(net(), batch(), budgets=["8GB", "8 apples"])
    with pytest.raises(TypeError, match="budget is a list"):
        memgraph.sweep(net(), batch(), budgets=[[8]])  # type: ignore[list-item]


def test_the_other_arguments_are_checked_as_in_compile() -> None:
    with pytest.raises(TypeError, match="model is a str"):
        memgraph.sweep("model", batch())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="values on cpu can go to 'disk' only"):
        memgraph.sweep(net(), batch(), offload="host")
    with pytest.raises(memgraph.SpillError, match="it is not a folder"):
        memgraph.sweep(net(), batch(), spill_dir="/nowhere")
    with pytest.raises(memgraph.CaptureError):
        memgraph.sweep(Fickle(), batch())


class Fickle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().numpy().sum())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y * 2 if y.sum() > 0 else y


def test_a_model_that_branches_on_values_is_swept() -> None:
    sweep = memgraph.sweep(Branching(), batch(), offload=None, time_limit=0)
    assert sweep.smallest < sweep.needs
