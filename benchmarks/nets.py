"""The models of the planner's benchmark, each returning its loss: GPT, a Llama-like one, a U-Net and a ResNet-50.

    loss = GPT(Size(layers=12, width=768, heads=12))(tokens, targets)

Sizes are arguments: large models are traced without memory, and small ones run on a CPU. There are no random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Through = Callable[..., Tensor]  # how a block is called: the block, and its arguments
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # of a ResNet-50: middle width, blocks, stride


@dataclass(frozen=True)
class Size:
    """The size of a language model."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 2048
    context: int = 1024
    gated: bool = False  # as in Llama: a product of two, instead of one GELU


def plainly(block: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call a block without a checkpoint."""
    return block(*args, **kwargs)


def checkpointed(block: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call a block with a checkpoint: backward recomputes it from its inputs."""
    return checkpoint(block, *args, use_reentrant=False, **kwargs)


class GPT(nn.Module):
    """A language model that takes tokens and targets, and returns the mean loss."""

    def __init__(self, size: Size, through: Through = plainly) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.through = through

    def forward(self, now: Tensor, then: Tensor) -> Tensor:
        x = self.token(now) + self.place(torch.arange(now.shape[1], device=now.device))
        for block in self.blocks:
            x = self.through(block, x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), then.flatten())


class Block(nn.Module):
    """Attention, then an MLP, each with a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.before_mlp = nn.LayerNorm(size.width)
        self.mlp = Gated(size.width) if size.gated else plain_mlp(size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).split(x.shape[-1], dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Llama's MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 64 * 64
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def plain_mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class UNet(nn.Module):
    """A U-Net: each level's last activation is concatenated on the way up."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(_convolved(i, o) for i, o in zip((3, *widths), widths, strict=False))
        self.middle = _convolved(widths[-1], 2 * widths[-1])
        self.raise_ = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths))
        self.up = nn.ModuleList(_convolved(2 * w, w) for w in reversed(widths))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for higher, up in zip(self.raise_, self.up, strict=True):
            x = up(torch.cat([higher(x), skips.pop()], dim=1))
        return F.mse_loss(self.out(x), wanted)


def _convolved(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()]
    return nn.Sequential(*layers)


class ResNet(nn.Module):
    """A ResNet-50: bottlenecks of three convolutions, each with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.ModuleList()
        inputs = 64
        for middle, count, stride in STAGES:
            for i in range(count):
                self.blocks.append(Bottleneck(inputs, middle, 1 if i else stride))
                inputs = 4 * middle
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        first, second = _normed(inputs, middle, 1), _normed(middle, middle, 3, stride)
        self.body = nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), *_normed(middle, 4 * middle, 1))
        same = stride == 1 and inputs == 4 * middle
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normed(inputs, 4 * middle, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _normed(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)
