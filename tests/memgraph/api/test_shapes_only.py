"""A call can be planned from shapes alone: tensors of device "meta" hold no bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memgraph


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, ids: Tensor, weight: Tensor | None = None) -> Tensor:
        x = self.layers(self.embed(ids))
        return (x if weight is None else x * weight).square().mean()


@pytest.mark.long
def test_the_plan_of_a_shape_is_that_of_a_batch() -> None:
    model, ids, weight = Model(), torch.zeros(40, 30, dtype=torch.long), torch.ones(40, 30, 1)
    plain = memgraph.plan(model, ids, weight=weight, budget="1GB")
    budget = int(0.93 * plain.peak)
    real = memgraph.plan(model, ids, weight=weight, budget=budget, offload=None)
    shape = memgraph.plan(model, ids.to("meta"), weight=weight.to("meta"), budget=budget, offload=None)
    assert shape.plan and shape.peak <= budget and real.peak <= budget
    assert memgraph.plan(model, ids.to("meta"), weight=weight.to("meta"), budget="1GB").peak == plain.peak


def test_a_budget_that_the_worst_shape_exceeds_is_refused_before_training() -> None:
    with pytest.raises(memgraph.BudgetError) as error:
        memgraph.plan(Model(), torch.empty(400, 300, dtype=torch.long, device="meta"), budget="2MB", offload=None)
    assert error.value.smallest > 2_000_000


def test_the_gradient_of_a_shape_is_planned() -> None:
    layer, x = nn.Linear(8, 8), torch.empty(16, 8, device="meta", requires_grad=True)
    report = memgraph.plan(layer, x, budget="1GB")
    real = memgraph.plan(layer, torch.ones(16, 8, requires_grad=True), budget="1GB")
    assert report.peak == real.peak


def test_a_sweep_takes_shapes_too() -> None:
    ids = torch.zeros(40, 30, dtype=torch.long)
    sweep = memgraph.sweep(Model(), ids.to("meta"), offload=None, budgets=["1GB"])
    assert sweep.points[0].peak == memgraph.plan(Model(), ids, budget="1GB").peak


def test_micro_batches_need_values() -> None:
    with pytest.raises(ValueError, match="give a batch with values"):
        memgraph.plan(nn.Linear(8, 8), torch.empty(8, 8, device="meta"), budget="1GB", microbatches=2)
