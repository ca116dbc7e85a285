"""Models with weights that are large beside all else, and batches for them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, WORDS, TOKENS = 256, 4096, 8


class Words(nn.Module):
    """A lookup, a layer, and a head over all words; returns the mean loss."""

    def __init__(self, tied: bool = False, bias: bool = True, padding: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, now: Tensor, then: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.gelu(self.layer(self.token(now)))), then)


class Projection(nn.Module):
    """A matrix that is read as it is, as transformers' Conv1D reads its weight: (inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) / 64)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight).square().mean()


def words(seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    now, then = torch.randint(WORDS, (2, TOKENS), generator=random)
    return now, then


@cache
def products_add_up() -> bool:
    """Return True if the product with a head is, to the bit, the sum of those with some blocks of its rows.

    That depends on how kernels of this machine divide sums.
    """
    random = torch.Generator().manual_seed(0)
    gradient, head = torch.randn(TOKENS, WORDS, generator=random), torch.randn(WORDS, WIDTH, generator=random)
    whole = gradient @ head
    return any(torch.equal(whole, _added(gradient, head, WORDS >> halvings)) for halvings in range(1, 8))


def _added(gradient: Tensor, head: Tensor, rows: int) -> Tensor:
    total, *others = (a @ b for a, b in zip(gradient.split(rows, 1), head.split(rows), strict=True))
    for other in others:
        total = total + other
    return total


head_in_blocks = pytest.mark.skipif(
    not products_add_up(), reason="no product of blocks adds up to the whole's bits here"
)
