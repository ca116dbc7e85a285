"""Where forward can't run again, other gradients than those of scalars are planned for if they fit, else refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import memgraph
from tests.support.zoo import Queue

X, TARGETS = torch.randn(16, 4, 48), torch.arange(16)


def queue() -> Queue:
    torch.manual_seed(0)
    return Queue(layers=2, length=4096)


def smallest() -> int:
    """Return bytes that are enough for the loss, and not for the logits as well."""
    with pytest.raises(memgraph.BudgetError) as error:
        memgraph.plan(queue(), X, TARGETS, budget=1000, accumulate=False)
    return error.value.smallest


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.long
def test_a_budget_that_is_too_small_for_all_outputs_is_planned_for_the_loss() -> None:
    budget = smallest()
    eager, model = queue(), memgraph.compile(queue(), budget, accumulate=False)
    for _ in range(3):
        for each in (eager, model):
            each.zero_grad()
            each(X, TARGETS)[0].backward()
        assert all(map(torch.equal, gradients(eager), gradients(model)))
        assert torch.equal(eager.queue, model.queue)
        assert model.plan.measured is not None and model.plan.measured <= model.plan.peak <= budget
    assert model.plan.all_outputs > budget
    assert "backward starts from the scalar outputs alone; from all of them it needs" in str(model.plan)


@pytest.mark.long
def test_another_gradient_is_then_refused_with_a_budget_that_works() -> None:
    budget = smallest()
    model = memgraph.compile(queue(), budget, accumulate=False)
    _, logits = model(X, TARGETS)
    with pytest.raises(memgraph.BudgetError, match="outputs other than the scalar ones") as error:
        logits.logsumexp(1).mean().backward()
    assert error.value.budget == budget and gradients(model) == []
    eager, larger = queue(), memgraph.compile(queue(), error.value.smallest, accumulate=False)
    for each in (eager, larger):
        each(X, TARGETS)[1].logsumexp(1).mean().backward()
    assert all(map(torch.equal, gradients(eager), gradients(larger)))
    assert larger.plan.all_outputs == 0


@pytest.mark.long
def test_a_saved_plan_for_the_loss_is_used_again() -> None:
    budget = smallest()
    saved = memgraph.plan(queue(), X, TARGETS, budget=budget, accumulate=False).to_json()
    model = memgraph.compile(queue(), budget, plan=saved, accumulate=False)
    model(X, TARGETS)[0].backward()
    assert model.plan.measured is not None and model.plan.measured <= budget < model.plan.all_outputs


class Scaled(torch.nn.Module):
    """Returns its loss and a value that depends on a tensor which forward then changes."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        scale = torch.zeros(64)
        if trained:
            self.scale = torch.nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x) * (self.scale.detach() + 1)
        with torch.no_grad():
            self.scale.add_(1)
        return y.pow(2).mean(), y


@pytest.mark.long
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("accumulate", [None, False, True])
def test_it_is_refused_in_later_steps_that_add_to_gradients(trained: bool, accumulate: bool | None) -> None:
    x = torch.randn(2048, 64, requires_grad=True)
    peak = memgraph.plan(Scaled(trained), x).peak
    model = memgraph.compile(Scaled(trained), int(0.95 * peak), accumulate=accumulate)
    model(x)[0].backward()
    before = [gradient.clone() for gradient in gradients(model)]
    with pytest.raises(memgraph.BudgetError, match="outputs other than the scalar ones") as error:
        model(x)[1].sum().backward()
    assert error.value.smallest > error.value.budget
    assert all(map(torch.equal, gradients(model), before))
