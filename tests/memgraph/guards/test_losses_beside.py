"""A loss that is a function may read the module, and keep numbers: no call is captured twice, and none is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memgraph

X, TARGET = torch.linspace(-1, 1, 32).view(4, 8), torch.tensor([0, 1, 2, 3])


class Routed(nn.Module):
    """Keeps a term of its loss, as mixtures of experts do."""

    balance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.balance = y.square().mean()
        return y


class Lazy(nn.Linear):
    """Returns its loss as a function."""

    def forward(self, x: Tensor) -> Callable[[Tensor], Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return lambda target: F.cross_entropy(y, target)


def test_a_term_that_the_module_keeps_is_read_by_the_loss_without_further_captures() -> None:
    module = Routed()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + module.balance

    expected = loss(module(X), TARGET).detach()
    step: Any = memgraph.compile(module, "64MB", loss=loss, time_limit=0)
    for _ in range(6):
        module.zero_grad()
        found = step(X, target=TARGET)
        assert torch.equal(found.detach(), expected)
        found.backward()
    assert step.__dict__["_kept"]._captures == 1


def test_numbers_that_a_loss_keeps_are_refused_and_leave_nothing_behind() -> None:
    kept = deque[float](maxlen=2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = F.cross_entropy(output, target)
        kept.append(found.item())
        return found * sum(kept)

    with pytest.raises(memgraph.CaptureError, match="forward changes the variable kept"):
        memgraph.compile(nn.Linear(8, 4), "64MB", loss=loss)(X, target=TARGET)
    assert not kept


def test_a_function_that_holds_tensors_is_no_result() -> None:
    with pytest.raises(memgraph.CaptureError, match="returns a function that holds tensors"):
        memgraph.compile(Lazy(8, 4), "64MB")(X)
