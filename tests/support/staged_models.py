"""Small models with their loss inside, for pipelines, and what their gradients should be.

model, batch = MODELS["batch norm"](rows)     # the same on each rank
gradients_in_turn(model, batch, chunks)       # of the mean loss of the micro-batches, by eager
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .models import gpt2, t5

Batch = dict[str, Tensor]


class BatchNormNet(nn.Module):
    """A small network of convolutions, whose buffers change in forward; a skip reads the first result at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return F.cross_entropy(self.last((x + first).mean((2, 3))), y)


class Frozen(nn.Module):
    """The first layers need no gradient, and a mask of them is read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8).requires_grad_(False)
        self.first, self.second = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.last = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.table(ids)).t().sin().t()
        mask = x > 0
        x = self.second(x).tanh()
        return F.cross_entropy(self.last(torch.where(mask, x, 0.5 * x)), ids)


class Skips(nn.Module):
    """A U-Net in small: the first results are read again by the last layers, over all layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = []
        for layer in self.layers[:4]:
            x = layer(x).tanh()
            kept.append(x)
        for layer in self.layers[4:]:
            x = layer(x + kept.pop()).relu()
        return F.mse_loss(x, y)


def language(rows: int, tied: bool) -> tuple[nn.Module, Batch]:
    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    sizes = {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 8}
    model = gpt2(**sizes, **none, tie_word_embeddings=tied)
    ids = torch.randint(0, 64, (rows, 8))
    return model, {"input_ids": ids, "labels": ids}


class UNet(nn.Module):
    """Convolutions with pooling, and skips from each level down to the one up, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = F.silu(layer(x))
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = F.silu(self.middle(x))
        for layer in self.up:
            x = F.silu(layer(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1)))
        return F.mse_loss(x, y)


def translation(rows: int) -> tuple[nn.Module, Batch]:
    """Return a T5 without dropout; its decoder reads the encoder's results in each layer."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "vocab_size": 32}
    ids = torch.randint(1, 32, (rows, 6))
    return t5(**sizes, dropout_rate=0.0, tie_word_embeddings=False), {"input_ids": ids, "labels": ids.flip(1)}


MODELS: dict[str, Callable[[int], tuple[nn.Module, Batch]]] = {
    "gpt2": lambda rows: language(rows, tied=False),
    "tied": lambda rows: language(rows, tied=True),
    "batch norm": lambda rows: (
        BatchNormNet(),
        {"x": torch.randn(rows, 4, 6, 6), "y": torch.randint(0, 3, (rows,))},
    ),
    "skips": lambda rows: (Skips(), {"x": torch.randn(rows, 8), "y": torch.randn(rows, 8)}),
    "t5": translation,
    "u-net": lambda rows: (UNet(), {"x": torch.randn(rows, 4, 16, 16), "y": torch.randn(rows, 4, 16, 16)}),
    "frozen": lambda rows: (Frozen(), {"ids": torch.randint(0, 16, (rows,))}),
}


def made(name: str, rows: int) -> tuple[nn.Module, Batch]:
    """Return a model in training mode and a mini-batch, the same in every process."""
    torch.manual_seed(0)
    model, batch = MODELS[name](rows)
    return model.train(), batch


def loss_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result.loss


def in_turn(model: nn.Module, batch: Batch, chunks: int, steps: int = 1) -> tuple[nn.Module, float]:
    """Return a copy of the model with the gradients of its micro-batches added in turn, and the mean loss."""
    plain, total, rows = copy.deepcopy(model), 0.0, len(next(iter(batch.values())))
    for new, old in zip(plain.parameters(), model.parameters(), strict=True):
        new.grad = None if old.grad is None else old.grad.clone()
    for _ in range(steps):
        for each in zip(*(value.chunk(chunks) for value in batch.values()), strict=True):
            loss = loss_of(plain(**dict(zip(batch, each, strict=True)))) * (len(each[0]) / rows)
            loss.backward()
            total += loss.item()
    return plain, total / steps


class Block(nn.Module):
    """A block of a transformer without attention, which has large values to recompute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks with a loss."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(count)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


def wide(rows: int) -> tuple[nn.Module, Batch]:
    """Return a model whose activations are larger than its parameters, and a mini-batch."""
    torch.manual_seed(0)
    return Blocks(32, 6), {"x": torch.randn(rows, 64, 32), "y": torch.randn(rows, 64, 32)}
