"""An error about a budget names micro-batches where they help, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph

WORDS = "microbatches=2 or more"


class Wide(nn.Module):
    """Activations that are much larger than the weights."""

    def __init__(self, then: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.then = nn.Linear(4, 64), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x)).sum(1)


def refused(model: nn.Module, rows: int = 512, **wishes: Any) -> memgraph.BudgetError:
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(model, torch.randn(rows, 4), budget=1000, offload=None, time_limit=0, **wishes)
    return caught.value


@pytest.mark.parametrize("wishes", [{}, {"loss": lambda out: out.square().mean()}])
def test_parts_are_named_and_help(wishes: dict[str, Any]) -> None:
    error = refused(Wide(), **wishes)
    assert f"or {WORDS}" in str(error)
    assert refused(Wide(), microbatches=2, **wishes).smallest < error.smallest


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64)),
        Wide(lambda h: h - h.mean(0)),
        Wide(lambda h: h.cumsum(0)),
    ],
)
def test_rows_that_depend_on_each_other_are_not_cut(model: nn.Module) -> None:
    assert WORDS not in str(refused(model))


def test_nor_is_a_batch_that_is_cut_already_or_of_one_row() -> None:
    assert WORDS not in str(refused(Wide(), microbatches=4))
    assert WORDS not in str(refused(Wide(), rows=1))


def test_nor_where_the_weights_are_in_the_way() -> None:
    assert WORDS not in str(refused(nn.Linear(4, 4096), rows=2))
