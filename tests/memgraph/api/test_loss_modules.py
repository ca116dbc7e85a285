"""A loss that is a module is a part of the step: its parameters are trained, its buffers and attributes are written."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph


class Squares(nn.Module):
    """A loss with state of several kinds, which its subclasses use."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return (output - target).square().sum()


class Warming(Squares):
    """Grows in its first calls."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target) * min(1.0, self.calls / 3)


class InPlace(Squares):
    """Changes its buffer."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(output.detach().mean())
        return super().forward(output, target) * self.mean


class Assigning(Squares):
    """Has another tensor as its buffer after each call."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + output.detach().mean()
        return super().forward(output, target) * self.mean


class Scaled(Squares):
    """Has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target) * self.scale


class Keeping(Squares):
    """Keeps its last result."""

    last: Tensor

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.last = super().forward(output, target)
        return self.last * 2


class Named(nn.Linear):
    """Has the first name that its loss could have."""

    loss = 3


def losses(step: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = []
    for number in range(5):
        optimizer.zero_grad()
        loss = step(torch.linspace(-1, 1, 8).view(2, 4) + number)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize("module", [nn.Linear, Named])
@pytest.mark.parametrize("kind", [Squares, Warming, InPlace, Assigning, Scaled, Keeping])
def test_a_loss_with_state_trains_as_in_eager(kind: Callable[[], Any], module: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    model, loss, target = module(4, 4), kind(), torch.zeros(2, 4)
    plain, plain_loss = deepcopy(model), deepcopy(loss)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], 1e-4)
    step = memgraph.compile(model, "64MB", loss=loss, optimizer=optimizer, time_limit=0)
    expected = losses(
        lambda x: plain_loss(plain(x), target),
        torch.optim.SGD([*plain.parameters(), *plain_loss.parameters()], 1e-4),
    )
    assert all(map(torch.equal, losses(lambda x: step(x, target=target), optimizer), expected))
    pairs = [(model, plain), (loss, plain_loss)]
    assert all(torch.equal(p, q) for each in pairs for p, q in zip(*(m.parameters() for m in each), strict=True))
    assert torch.equal(loss.mean, plain_loss.mean) and loss.calls == plain_loss.calls
    if kind is Keeping:
        assert torch.equal(loss.last, plain_loss.last)
    assert model.state_dict().keys() == step.state_dict().keys()


def test_a_loss_that_returns_nothing_is_named() -> None:
    def forgetful(output: Tensor, target: Tensor) -> None:
        (output - target).square().mean()

    compiled = memgraph.compile(nn.Linear(4, 4), "1GB", loss=forgetful)
    with pytest.raises(TypeError, match=r"loss= \(.*forgetful\) returned None, .*is its `return` missing"):
        compiled(torch.ones(2, 4), target=torch.ones(2, 4))
