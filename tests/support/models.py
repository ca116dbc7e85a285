"""Small networks for several tests: plain ones, and models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """A net with dropout and a tied weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), self.normed(width)
        self.drop, self.second = nn.Dropout(0.2), nn.Linear(width, width)
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.second(F.gelu(self.norm(self.first(x)))).tanh()))

    def normed(self, width: int) -> nn.Module:
        return nn.LayerNorm(width)


class Running(Net):
    """A net with buffers that forward changes."""

    def normed(self, width: int) -> nn.Module:
        return nn.BatchNorm1d(width)


class Plain(nn.Module):
    """A net with dropout that uses each weight once, so that the order of gradient sums is fixed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.second = (
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.Dropout(0.2),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(F.gelu(self.norm(self.first(x))))).tanh()


class Heads(nn.Module):
    """A model that returns a loss and its terms."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = Net(), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        left, right = self.left(h), self.right(h).exp()
        return {"loss": left.square().mean() + right.mean(), "left": left, "right": right}


class Function(nn.Module):
    """A linear layer, and any function of its output."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if layer is not None:
            self.linear.layer = layer
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


def net(width: int = 32, layers: int = 4) -> nn.Module:
    """Return layers with dropout, from a fixed seed."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)])


def batch(rows: int = 100, width: int = 32) -> Tensor:
    """Return an input of `net`."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(5))


def gpt2(**sizes: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert(**sizes: Any) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def llama(**sizes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def t5(**sizes: Any) -> nn.Module:
    options: dict[str, Any] = {**sizes, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**options))


def vit(**sizes: Any) -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
