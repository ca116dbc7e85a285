"""Models that are captured on a described device, and their calls.

CALLS["gpt2 bf16"]()   ->   Training, and how autocast is set for it

Small nets first, one for each library that CUDA dispatches to, then the architectures of `benchmarks/zoo`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.training import Maker, Training, with_criterion

ROWS, LENGTH, WIDTH = 4, 64, 64
DROPOUT = 0.125  # cuDNN takes multiples of 1/16 alone
FLOAT, HALF = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Subject:
    """A training, and the dtype that autocast gives it; float32 for none."""

    name: str
    make: Maker
    dtype: torch.dtype = FLOAT

    @property
    def title(self) -> str:
        """The name, with the dtype if it is another than float32."""
        return self.name if self.dtype == FLOAT else f"{self.name} bf16"


class Attention(nn.Module):
    """A block of causal attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=DROPOUT)
        return x + self.out(y.transpose(1, 2).flatten(2))


def attention() -> Training:
    """Return the training of two blocks of attention."""
    model = nn.Sequential(Attention(), Attention())
    return with_criterion(model, _squares, torch.randn(ROWS, LENGTH, WIDTH))


def convolutions() -> Training:
    """Return the training of convolutions with batch norm, whose statistics cuDNN updates in place."""
    layers = [(nn.Conv2d(i, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)) for i in (3, 16, 16)]
    model = nn.Sequential(*(each for layer in layers for each in layer), nn.GroupNorm(4, 16))
    return with_criterion(model, _squares, torch.randn(ROWS, 3, 16, 16))


def recurrent() -> Training:
    """Return the training of a recurrent net with dropout, which cuDNN runs as one op."""
    model = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=DROPOUT, batch_first=True)
    return with_criterion(model, _first_squares, torch.randn(ROWS, LENGTH, WIDTH))


class Experts(nn.Module):
    """Products of groups of rows, as routed experts compute them."""

    ends: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.register_buffer("ends", torch.arange(16, 65, 16, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.bfloat16()
        return F.grouped_mm(rows, self.weight.bfloat16(), offs=self.ends).float()


def experts() -> Training:
    """Return the training of grouped products."""
    return with_criterion(Experts(), _squares, torch.randn(64, WIDTH))


SMALL = {"attention": attention, "convolutions": convolutions, "recurrent": recurrent, "experts": experts}


def subjects(only: Callable[[str], bool] = bool) -> Iterator[Subject]:
    """Yield what is captured: each in float32, and under autocast in bfloat16."""
    makers = dict(SMALL)
    for name, each in ARCHITECTURES.items():
        if find_spec(each.library) is not None:
            makers[name if name not in makers else f"{name} ({each.library})"] = each.make
    for name, make in makers.items():
        yield from (each for each in (Subject(name, make), Subject(name, make, HALF)) if only(each.title))


def left_out_libraries() -> list[str]:
    """Return the libraries of architectures that are not installed."""
    return sorted({each.library for each in ARCHITECTURES.values() if find_spec(each.library) is None})


def _squares(outputs: Tensor, target: object) -> Tensor:
    return outputs.square().mean()


def _first_squares(outputs: tuple[Tensor, ...], target: object) -> Tensor:
    return outputs[0].square().mean()
