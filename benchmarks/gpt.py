"""A byte-level GPT in plain PyTorch, and its training text: the source of Python's standard library.

    model = GPT(Shape())                      # 25 million parameters
    loss = model(*batch(text(), step=0))      # 8 x 256 bytes; each predicts the byte after it

It has dropout, as most models have, and no code for memgraph.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """The size of the model."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    context: int = 256
    dropout: float = 0.1


class GPT(nn.Module):
    """A language model over bytes that takes tokens and targets, and returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_draw)

    def forward(self, now: Tensor, then: Tensor) -> Tensor:
        places = torch.arange(now.shape[1], device=now.device)
        x = self.dropout(self.byte(now) + self.place(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), then.flatten())


class Block(nn.Module):
    """Attention, then an MLP, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.before_mlp = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x)))
        return x + self.dropout(self.mlp(self.before_mlp(x)))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


def text() -> Tensor:
    """Return the source of the standard library without its tests, ordered by file name."""
    return torch.frombuffer(bytearray().join(path.read_bytes() for path in _sources()), dtype=torch.uint8)


def batch(text: Tensor, step: int, size: int = 8, context: int = 256) -> tuple[Tensor, Tensor]:
    """Return tokens and targets; they depend on the step only, and not on the global generator."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context, (size, 1), generator=generator)
    passages = text[starts + torch.arange(context + 1)].long()
    return passages[:, :-1].contiguous(), passages[:, 1:].contiguous()


def _sources() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.relative_to(root).parts):
            yield path


def _draw(module: nn.Module) -> None:
    """Initialize weights with small numbers, so that the first loss is near that of a uniform guess."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
