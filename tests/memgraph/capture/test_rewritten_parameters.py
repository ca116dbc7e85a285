"""Parameters that forward writes to itself are written once, also for a loss that no backward was planned for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.compare import Fact, assert_alike

IDS = torch.tensor([[0, 1, 2], [2, 2, 5]])


class Renormed(nn.Module):
    """An embedding whose rows are cut to a norm as they are looked up, and a loss beside what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embedding(ids))
        return logits.square().mean(), logits


class Normalized(nn.Module):
    """A weight that is normalized in place before it is used, a buffer that counts that, and a loss beside an output."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.w.div_(self.w.norm())
            self.steps += 1
        logits = nn.functional.one_hot(ids % 4, 4).float() @ self.w
        return logits.square().mean(), logits


class NormalizedAfter(Normalized):
    """The weight is normalized once it has been read, so that no second forward would find what the first one did."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = nn.functional.one_hot(ids % 4, 4).float() @ self.w.clone()
        with torch.no_grad():
            self.w.div_(self.w.norm())
            self.steps += 1
        return logits.square().mean(), logits


def trained(model: Any) -> list[Fact]:
    """Steps of a loss of the output beside the loss, of both, of a part of it, and of the loss; what was written."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    facts: list[Fact] = []
    for step in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss, logits = model(IDS)
            total = [logits.sin().sum(), loss + logits.exp().mean(), logits[0].tanh().sum(), loss][step % 4]
            total.backward()
        written = [*model.parameters(), *model.buffers()]
        facts += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        facts += [tensor.detach().clone() for tensor in written]
        optimizer.step()
        optimizer.zero_grad()
    return facts


@pytest.mark.long
@pytest.mark.parametrize("make", [Renormed, Normalized, NormalizedAfter])
def test_a_loss_of_other_outputs_finds_parameters_that_forward_has_written_once(make: Callable[[], nn.Module]) -> None:
    assert_alike(trained, make)
