"""A few blocks of the size of GPT2-XL's or Llama-3-8B's, with a loss on the whole output.

    loss = stack("llama-8b")(x)       # x: bf16[1, 4096, 4096]

Blocks take most of the time of a model, and a few of them compile in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.nets import Block, Size, Through, plainly


@dataclass(frozen=True)
class Shape:
    """The size of a stack, and of its batch."""

    blocks: int
    width: int
    heads: int
    length: int
    batch: int
    inner: int = 0  # of the gated MLP of a Llama; 0: a GPT
    shared: int = 1  # query heads that read the same keys

    def toy(self) -> Shape:
        """Return a shape that is small enough for a CPU and a second."""
        inner = 96 if self.inner else 0
        return replace(self, blocks=2, width=64, heads=4, length=64, batch=2, inner=inner, shared=min(2, self.shared))


SHAPES = {
    "gpt2-xl": Shape(blocks=8, width=1600, heads=25, length=2048, batch=4),
    "llama-8b": Shape(blocks=4, width=4096, heads=32, length=4096, batch=2, inner=14336, shared=4),
}


class Stack(nn.Module):
    """A sequence of blocks, and the mean square of its output."""

    def __init__(self, shape: Shape, through: Through = plainly) -> None:
        super().__init__()
        size = Size(shape.blocks, shape.width, shape.heads)
        self.blocks = nn.ModuleList(LlamaBlock(shape) if shape.inner else Block(size) for _ in range(shape.blocks))
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return x.float().square().mean()


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, then a gated MLP, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.shared, self.size = shape.heads, shape.shared, shape.width // shape.heads
        keys = self.size * (shape.heads // shape.shared)
        self.before_attention, self.before_mlp = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k, self.v = (nn.Linear(shape.width, keys, bias=False) for _ in range(2))
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.width, bias=False)
        angle = torch.outer(torch.arange(shape.length), 10_000.0 ** -torch.linspace(0, 1, self.size // 2)).repeat(1, 2)
        self.cosine: Tensor
        self.sine: Tensor
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self._turned(q), self._turned(k)
        k, v = (part.repeat_interleave(self.shared, dim=1) for part in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))

    def _turned(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * self.cosine + torch.cat([-high, low], dim=-1) * self.sine


def stack(shape: Shape, device: torch.device, through: Through = plainly) -> tuple[Stack, Tensor]:
    """Return a model in bfloat16 and its input, from a fixed seed."""
    torch.manual_seed(0)
    with torch.device(device), default_dtype(torch.bfloat16):  # so that no float32 originals leave holes
        model = Stack(shape, through)
        return model, torch.randn(shape.batch, shape.length, shape.width, dtype=torch.bfloat16)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let new tensors of numbers have this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
