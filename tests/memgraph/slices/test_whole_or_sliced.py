"""slices="auto" takes the faster plan, with slices or without; prices of ops decide, and are given here."""

from __future__ import annotations

import copy
import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memgraph
from memgraph.graph.summarize import Cost
from memgraph.planning import search
from memgraph.planning.accumulated_step import AccumulatedStep
from memgraph.planning.later_step import LaterStep
from memgraph.profile.op_profiler import OpProfiler, is_view
from passes import Machine, PlanResult, make_plan
from passes.slices import whole_step
from tests.support.compare import same_gradients
from tests.support.sliced_models import VOCABULARY, WIDTH, cross_entropy
from tests.support.sliced_training import assert_kept, assert_near, batch, budget_of, headed, step

WIDE = 0.7  # of what eager holds: with slices and without, a plan is needed, and fits
Price = Callable[[fx.Node, Cost], Cost]


class Stacked(nn.Module):
    """Layers with more bytes that wait for backward than the head has; some of them may run again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.up, self.down = (nn.ModuleList(nn.Linear(*size) for _ in range(8)) for size in ((WIDTH, 64), (64, WIDTH)))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)).sin())
        return cross_entropy(self.head(x), labels)


def alike(node: fx.Node, cost: Cost) -> Cost:
    """Each op takes as long, however small it is: a slice in four parts takes four times as long."""
    return Cost(100.0, cost.workspace)


def by_size(node: fx.Node, cost: Cost) -> Cost:
    """Each op takes as long as its result has bytes, so that parts take no longer than the whole."""
    value = node.meta["val"]
    return Cost(value.nbytes / 100 if isinstance(value, torch.Tensor) else 100.0, cost.workspace)


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Price], None]:
    """Let ops have other prices than those that are measured."""
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    measured = OpProfiler.__call__

    def let(price: Price) -> None:
        def given(profiler: OpProfiler, node: fx.Node) -> Cost:
            return Cost() if is_view(node) else price(node, measured(profiler, node))

        monkeypatch.setattr(OpProfiler, "__call__", given)

    return let


def planned(module: nn.Module, budget: int, **options: Any) -> memgraph.Report:
    return memgraph.plan(module, *batch(), budget=budget, slices="auto", offload=None, **options)


@pytest.mark.long
@pytest.mark.parametrize("price, is_sliced", [(alike, False), (by_size, True)], ids=["whole", "in slices"])
def test_the_faster_plan_is_taken(price: Price, is_sliced: bool, priced: Callable[[Price], None]) -> None:
    priced(price)
    module = Stacked()
    eager, budget = copy.deepcopy(module), budget_of(module, WIDE)
    model = memgraph.compile(module, budget, slices="auto", offload=None)
    for _ in range(2):  # the second call adds to gradients
        assert torch.equal(step(model), step(eager))
        report = model.plan
        assert bool(report.slices) == is_sliced
        assert report.measured is not None and report.measured <= report.peak <= budget
    assert_near(module, eager)
    assert is_sliced or same_gradients(module, eager)  # nothing is added in another order


@pytest.mark.long
@pytest.mark.parametrize("price", [alike, by_size])
def test_a_plan_a_step_and_a_sweep_take_the_same_one(price: Price, priced: Callable[[Price], None]) -> None:
    priced(price)
    module = Stacked()
    budget = budget_of(module, WIDE)
    report = planned(module, budget, accumulate=False)
    model = memgraph.compile(module, budget, slices="auto", offload=None, accumulate=False)
    step(model)
    (point,) = memgraph.sweep(
        Stacked(), *batch(), budgets=[budget], slices="auto", offload=None, accumulate=False
    ).points
    assert model.plan.slices == report.slices and model.plan.forecast.us == report.forecast.us == point.us
    assert report.choice.others is not None
    assert point.gap <= report.gap + 1e-9


@pytest.mark.long
def test_the_bound_is_that_of_both_kinds(priced: Callable[[Price], None], monkeypatch: pytest.MonkeyPatch) -> None:
    priced(alike)
    module = Stacked()
    budget = budget_of(module, WIDE)
    whole = planned(module, budget)
    assert "no plan, without slices or with those it was chosen over, in which each value" in str(whole)
    monkeypatch.setattr(whole_step, "WORTH", 1.0)  # nothing is worth a search
    sliced = planned(module, budget)
    assert sliced.slices and sliced.choice.others is not None
    assert sliced.lower_bound <= sliced.choice.others.once_us == whole.choice.captured.us < whole.forecast.us
    assert sliced.gap > 0.1 > whole.gap
    assert "no plan, with these slices or none, in which each value" in str(sliced)
    for report in (whole, sliced):
        read = memgraph.Report.from_json(report.to_json())
        assert (read.gap, read.choice.others) == (report.gap, report.choice.others)


@pytest.mark.long
def test_what_no_plan_makes_fit_is_neither_priced_nor_searched_for(
    priced: Callable[[Price], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    priced(alike)
    module, seen = headed(), list[float]()

    def noted(*given: Any, **options: Any) -> PlanResult:
        seen.append(options.get("below", 0.0))
        return make_plan(*given, **options)

    monkeypatch.setattr(search, "make_plan", noted)
    report = planned(module, budget_of(module), accumulate=False)
    assert report.slices and seen == [0.0] and report.choice.others is None
    assert "no plan with these slices in which" in str(report) or not report.plan
    planned(Stacked(), budget_of(Stacked(), WIDE), accumulate=False)
    assert len(seen) == 3 and seen[2] > 0


@pytest.mark.long
def test_a_second_call_finds_both_plans_in_the_cache(
    priced: Callable[[Price], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    priced(alike)
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    module = Stacked()
    budget = budget_of(module, WIDE)
    first = planned(module, budget, accumulate=False)

    def never(*given: Any, **options: Any) -> PlanResult:
        assert "below" not in options, "a plan of the whole was searched for"
        return make_plan(*given, **options)

    monkeypatch.setattr(search, "make_plan", never)
    again = planned(module, budget, accumulate=False)
    assert (again.slices, again.plan, again.gap) == (first.slices, first.plan, first.gap) == ((), first.plan, again.gap)


@pytest.mark.long
def test_an_interrupt_while_the_whole_is_searched_for_begins_in_slices(
    priced: Callable[[Price], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    priced(alike)
    module = Stacked()
    eager, budget = copy.deepcopy(module), budget_of(module, WIDE)

    def pressed(*given: Any, **options: Any) -> PlanResult:
        if "below" in options:
            signal.raise_signal(signal.SIGINT)
        return make_plan(*given, **options)

    monkeypatch.setattr(search, "make_plan", pressed)
    model = memgraph.compile(module, budget, slices="auto", offload=None)
    with caplog.at_level(logging.WARNING, "memgraph"):
        assert torch.equal(step(model), step(eager))
    assert "the step runs in slices, and may be faster without" in caplog.text
    assert_kept(model)
    assert_near(module, eager)


@pytest.mark.long
def test_a_call_that_adds_is_told_to_fit_if_it_does_in_slices(
    priced: Callable[[Price], None], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    priced(alike)

    def planned_later(step: LaterStep, result: PlanResult, machine: Machine) -> AccumulatedStep:
        fits = bool(step.first.captured.slices)
        return AccumulatedStep(machine.budget, ()) if fits else AccumulatedStep(2 * machine.budget)

    monkeypatch.setattr(LaterStep, "unwarned", planned_later)
    report = planned(Stacked(), budget_of(Stacked(), WIDE))
    assert not report.slices and report.adding == report.budget
    assert not [str(each.message) for each in recwarn if "adds to gradients" in str(each.message)]
