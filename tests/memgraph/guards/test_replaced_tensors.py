"""A tensor that the caller puts into an attribute before each step costs two captures, and no more."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph

X = torch.linspace(-1, 1, 8).view(2, 4)


class Masked(nn.Module):
    """Multiplies with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask: Any = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * (2 if self.mask is None else self.mask)).sum()


class Both(nn.Module):
    """Has two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Masked(), Masked()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) + self.second(x)
        return y


class Decaying(Masked):
    """Writes it as well."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mask = self.mask * 0.5
        return y


class Asking(Masked):
    """Asks for its values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.mask.sum() > 2 else 3)


def mask(module: Any, step: int) -> None:
    module.mask = torch.full((4,), 0.1 * step)


def mask_of_a_shape(module: Any, step: int) -> None:
    module.mask = torch.full((2, 4) if step % 2 else (4,), 0.1 * step)


def mask_or_none(module: Any, step: int) -> None:
    module.mask = torch.full((4,), 0.1 * step) if step % 3 else None


def masks(module: Any, step: int) -> None:
    mask(module.first, step)
    module.second.mask = module.first.mask if step % 2 else torch.full((4,), 0.3 * step)


@pytest.mark.parametrize(
    ("kind", "change", "captures"),
    [
        (Masked, mask, 2),
        (Masked, mask_of_a_shape, 3),
        (Masked, mask_or_none, 4),
        (Both, masks, 4),
        (Decaying, mask, 1),
        (Asking, mask, 3),
    ],
)
def test_a_tensor_that_is_replaced_is_an_argument(
    kind: Callable[[], nn.Module], change: Callable[[Any, int], None], captures: int
) -> None:
    module = kind()
    plain = deepcopy(module)
    step: Any = memgraph.compile(module, "64MB", time_limit=0)
    for number in range(9):
        found = []
        for each, run in ((module, step), (plain, plain)):
            change(each, number)
            each.zero_grad()
            loss = run(X)
            loss.backward()
            found.append([loss.detach(), *(parameter.grad for parameter in each.parameters())])
        assert all(map(torch.equal, *found))
    assert step.__dict__["_kept"]._captures <= captures
