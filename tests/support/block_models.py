"""Models with weights that are large beside all else, and batches for them."""

from __future__ import annotations

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
