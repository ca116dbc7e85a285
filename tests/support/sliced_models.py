"""Small models with a large last layer, and losses that people train with.

MODELS["z-loss"]()    ->    a model, and the arguments of a call
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import models as nets

VOCABULARY, WIDTH, IGNORED = 96, 8, -100
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()


def soft_capped(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(5.0 * torch.tanh(logits / 5.0), labels)


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    each = cross_entropy(logits, labels, reduction="none").view_as(labels)
    seen = labels > 8
    return (each * seen).sum() / seen.sum()


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1], labels[:, 1:])


def smoothed_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    p = logits.log_softmax(-1)
    return -(0.9 * p.gather(-1, labels.unsqueeze(-1)).squeeze(-1) + 0.1 * p.mean(-1)).mean()


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    each = cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-each)).square() * each).mean()


def in_float(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.float(), labels)


class Headed(nn.Module):
    """An embedding, a layer with dropout, and a head with its loss."""

    def __init__(self, loss: Loss, tied: bool = False, bias: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.layer(self.embedding(tokens))))
        return self.loss(self.head(self.norm(x)), labels)


class Heads(Headed):
    """Two heads, and the sum of their losses."""

    def __init__(self) -> None:
        super().__init__(cross_entropy)
        self.second = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.norm(torch.tanh(self.layer(x)))
        return self.loss(self.head(y), labels) + 0.5 * self.loss(self.second(self.norm(y + x)), labels)


class Returning(Headed):
    """A model that returns its logits as well."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.norm(self.embedding(tokens)))
        return {"loss": self.loss(logits, labels), "logits": logits}


class Mixers(nn.Module):
    """Wide layers without a large head."""

    def __init__(self, times: int = 16) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH * times) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(WIDTH * times, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return x.square().mean()


class Block(nn.Module):
    """A block of a transformer, with its scores of attention and its hidden values written out."""

    def __init__(self, drop: float, inner: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.drop, self.inner = nn.Dropout(drop), nn.Dropout(inner)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        scores = ((q @ k.transpose(-1, -2)) * (width // 2) ** -0.5).softmax(-1)
        x = x + self.drop(self.out((scores @ v).transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(self.inner(F.gelu(self.up(self.second(x))))))


class Blocks(nn.Module):
    """A small transformer without a head: dropout behind attention and MLP, and `inner` dropout of hidden values."""

    def __init__(self, drop: float = 0.0, inner: float = 0.0, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop, inner) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def rows(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))


def tokens(batch: int = 2, length: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randint(VOCABULARY, (batch, length), generator=generator) for _ in range(2))
    second[:, :2] = IGNORED
    return first, second


def all_labels(batch: int = 2, length: int = 12) -> tuple[Tensor, Tensor]:
    first, second = tokens(batch, length)
    return first, second.clamp(min=0)


def _gpt2() -> nn.Module:
    return nets.gpt2(vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=2, use_cache=False)


def _llama() -> nn.Module:
    return nets.llama(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip


def _text(make: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    def made() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        ids, labels = tokens()
        return make(), (), {"input_ids": ids, "labels": labels}

    return made


def _headed(loss: Loss, call: Any = all_labels, **options: Any) -> Callable[[], Any]:
    return lambda: (Headed(loss, **options), call(), {})


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, label_smoothing=0.1)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="sum")


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, weight=torch.linspace(0.5, 2.0, VOCABULARY))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "gpt2": _text(_gpt2),
    "llama": _text(_llama),
    "cross entropy": _headed(cross_entropy),
    "ignored labels": _headed(cross_entropy, tokens),
    "a sum": _headed(summed, tokens),
    "weights": _headed(weighted),
    "label smoothing": _headed(smoothed, tokens),
    "smoothing by hand": _headed(smoothed_by_hand),
    "z-loss": _headed(z_loss, tokens),
    "soft-capping": _headed(soft_capped, tokens),
    "a mask": _headed(masked),
    "shifted labels": _headed(shifted),
    "focal loss": _headed(focal),
    "in float": _headed(in_float),
    "tied weights": _headed(cross_entropy, tokens, tied=True),
    "a bias": _headed(cross_entropy, bias=True),
    "two heads": lambda: (Heads(), tokens(), {}),
    "logits returned": lambda: (Returning(cross_entropy), tokens(), {}),
    "wide layers": lambda: (Mixers(), (rows(2, 6),), {}),
    "a transformer": lambda: (Blocks(), (rows(),), {}),
    "dropout behind blocks": lambda: (Blocks(drop=0.2), (rows(),), {}),
    "dropout in blocks": lambda: (Blocks(drop=0.2, inner=0.3), (rows(1, 48),), {}),
}


def made(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a model from a fixed seed, and the arguments of a call."""
    torch.manual_seed(0)
    return MODELS[name]()
