"""Uses that need more than the plan counts run; the user is told before, and their bytes are measured."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.smallest_budget import smallest_of


def net() -> nn.Module:
    """Little but parameters and gradients."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


def batch() -> Tensor:
    return torch.ones(1, 64)


def asked(model: nn.Module) -> list[Tensor]:
    """Gradients that autograd is asked for while others are there, and these."""
    model(batch()).sin().sum().backward()
    parameters = list(model.parameters())
    found = torch.autograd.grad(model(batch()).cos().sum(), parameters)
    return [*found, *(parameter.grad for parameter in parameters if parameter.grad is not None)]


def report(budget: int) -> memgraph.Report:
    ours, theirs = net(), net()
    compiled = memgraph.compile(ours, budget, offload=None, time_limit=0)
    assert all(map(torch.equal, asked(compiled), asked(theirs)))
    return compiled.plan


def test_gradients_beside_others_that_have_no_room_are_said_to_exceed_the_budget() -> None:
    budget = smallest_of(lambda: memgraph.plan(net(), batch(), budget=1, offload=None, time_limit=0))
    with pytest.warns(RuntimeWarning, match="over its budget of"):
        plan = report(budget)
    assert plan.measured is not None and plan.measured > plan.budget
    assert "over the budget" in str(plan) and "beside existing ones" in str(plan)


def test_with_room_for_both_nothing_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = report(10**8)
    assert plan.measured is not None and plan.measured <= plan.budget
    assert "please report" not in str(plan)


def test_an_update_of_some_of_the_gradients_may_take_more_than_one_of_all() -> None:
    """A small parameter between two large ones keeps their temporaries apart in torch's loop."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    compiled = memgraph.compile(model, 10**8, optimizer=optimizer, time_limit=0)
    compiled(torch.ones(1, 128)).sum().backward()
    model.get_parameter("0.bias").grad = None
    optimizer.step()
    plan = compiled.plan
    assert plan.measured is not None and plan.measured > plan.peak
    assert "fewer gradients" in str(plan)
