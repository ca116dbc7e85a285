"""The caller may change an output in place that is a view within the step, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze(-1).transpose(0, 1)


class Sigmoid(nn.Module):
    """Backward reads the output, which is a view of what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sigmoid().flatten(1)


def masked(out: Tensor, x: Tensor) -> Tensor:
    out[..., 0] = -1.0
    return out


def added(out: Tensor, x: Tensor) -> Tensor:
    out += x
    return out


def scaled(out: Tensor, x: Tensor) -> Tensor:
    return out.div_(0.7).clamp_(-0.5, 0.5)


def train(make: Callable[[], nn.Module], change: Any, compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = make()
    model = memgraph.compile(net, "1GB") if compiled else net
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), []
    for seed in range(3):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed))
        loss = change(model(x), x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [
            loss.detach(),
            *(parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None),
        ]
    return found


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: nn.Linear(8, 8), masked),
        (lambda: nn.Linear(8, 8), added),
        (Attention, added),
        (Attention, scaled),
        (Squeezed, scaled),
        (Squeezed, masked),
    ],
)
def test_an_output_is_changed_in_place_as_in_eager(make: Callable[[], nn.Module], change: Any) -> None:
    assert all(map(torch.equal, train(make, change, compiled=True), train(make, change, compiled=False)))


def test_what_backward_reads_may_not_be_changed() -> None:
    net = Sigmoid()
    x = torch.randn(2, 3, 8)
    for model in (copy.deepcopy(net), memgraph.compile(net, "1GB")):
        out = model(x)
        out.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified (by an|in) ?(inplace|place)"):
            out.sum().backward()


class Halves(nn.Module):
    """Two outputs have one storage: torch refuses to change one of them, in eager too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x).chunk(2, -1)


def test_one_of_two_views_of_a_tensor_is_refused_as_in_eager() -> None:
    net = Halves()
    x = torch.randn(2, 3, 8)
    for model in (copy.deepcopy(net), memgraph.compile(net, "1GB")):
        first, _ = model(x)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            first.mul_(2)
