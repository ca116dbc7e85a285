"""A graph that is kept for a second backward: it takes more than the plan, which is forecast, said and measured."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.report.report import Report
from tests.support.models import batch, net
from tests.support.zoo import CASES, fresh


def grads(model: nn.Module, retain: bool) -> list[Tensor | None]:
    torch.manual_seed(1)
    loss = model(batch()).sin().sum()
    loss.backward(retain_graph=retain)
    if retain:
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def report(budget: int, retain: bool) -> Report:
    model, twin = net(), net()
    compiled = memgraph.compile(model, budget, time_limit=0)
    for ours, theirs in zip(grads(compiled, retain), grads(twin, retain), strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    return compiled.plan


def tight() -> int:
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(net(), batch(), budget=1, offload=None, time_limit=0)
    return caught.value.smallest


def test_a_budget_without_room_for_it_is_said_to_be_exceeded() -> None:
    budget = tight()
    with pytest.warns(RuntimeWarning, match="retain_graph=True"):
        plan = report(budget, retain=True)
    assert plan.measured is not None
    assert plan.measured <= plan.forecast.retained
    assert plan.measured > plan.budget
    assert str(plan).startswith("over the budget: ") and "retain_graph=True" in str(plan)


def test_a_budget_with_room_for_it_is_kept() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = report(10**8, retain=True)
    assert plan.measured is not None
    assert plan.peak < plan.measured <= plan.forecast.retained <= plan.budget
    assert str(plan).startswith("over the forecast: ")


def test_one_backward_takes_what_was_forecast() -> None:
    plan = report(10**8, retain=False)
    assert plan.measured is not None and plan.measured <= plan.peak
    assert str(plan).startswith("fits: ")


@pytest.mark.long
def test_memory_that_ops_of_backward_would_have_used_again_is_counted() -> None:
    case = next(case for case in CASES if case.name == "gpt2")
    model, inputs = fresh(case)
    peak = memgraph.plan(model, *inputs.args, budget="1GB", time_limit=0, **inputs.kwargs).peak
    compiled = memgraph.compile(model, peak * 7 // 10, time_limit=0)
    loss = case.loss(inputs.of(compiled))
    with pytest.warns(RuntimeWarning, match="retain_graph=True") as said:
        loss.backward(retain_graph=True)
    loss.backward()
    (stated,) = re.findall(r"may take (\d+) bytes", "".join(str(each.message) for each in said))
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= int(stated)
