"""An op whose workspace depends on its values is priced with the values that need most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.profile import op_profiler
from tests.support.compare import ROOM

ROWS = torch.randint(0, 24, (320,), generator=torch.Generator().manual_seed(0))
MASK = torch.rand(32, 24, generator=torch.Generator().manual_seed(0)) > 0.1


def largest_of_bags(y: Tensor) -> Tensor:
    """Only bags that are not empty are looked up in backward."""
    return F.embedding_bag(ROWS, y, torch.arange(0, 320, 4), mode="max")


def log_determinant(y: Tensor) -> Tensor:
    """Pivots begin at one, so backward's op fails on zeros."""
    return torch.linalg.slogdet(y.view(48, 4, 4)).logabsdet


def scattered(y: Tensor) -> Tensor:
    """Backward selects by the mask."""
    return torch.zeros(32, 24).masked_scatter(MASK, y)


class Through(nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(24, 24), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).sum()


@pytest.mark.long
@pytest.mark.parametrize("function", [largest_of_bags, log_determinant, scattered])
def test_workspaces_that_depend_on_values_are_within_the_forecast(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(op_profiler, "_known", {})
    torch.manual_seed(0)
    compiled = memgraph.compile(Through(function), ROOM)
    compiled(torch.randn(32, 24)).backward()
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak
