"""Modules whose lengths vary, trained beside eager, and the traces that are made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph


class Encoder(nn.Module):
    """Attention with dropout, a mask that the length makes, and a buffer that counts tokens."""

    tokens: Tensor

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(50, width), nn.Embedding(64, width)
        self.inside, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50)
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        length = ids.shape[1]
        x = self.embed(ids) + self.positions(torch.arange(length))[None]
        query, key, value = self.inside(x).view(*ids.shape, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=0.1 * self.training)
        x = F.dropout(self.norm(x + self.out(mixed.transpose(1, 2).reshape(x.shape))), 0.1, self.training)
        self.tokens += ids.shape[0]
        logits = self.head(x)
        if labels is None:
            return logits, length
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Branch(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.run = nn.Linear(6, 6), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.linear, x)


class Traces:
    """Counts traces, and those with symbols."""

    def __init__(self) -> None:
        self.plain, self.general = 0, 0


def ids_of(length: int, rows: int = 3) -> Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(length))


def trained(module: nn.Module, calls: Sequence[Any], compiled: Any = None) -> list[Tensor]:
    """Train with a call after the other; return losses, gradients and buffers."""
    found: list[Tensor] = []
    for number, call in enumerate(calls):
        torch.manual_seed(number)
        result = (compiled or module)(*call)
        loss = (result[0] if isinstance(result, tuple) else result).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in module.buffers()]
        found += [torch.tensor(part) for part in (result[1:] if isinstance(result, tuple) else ())]
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad)
        module.zero_grad()
    return found


def check(module: nn.Module, calls: Sequence[Any], budget: Any = None) -> memgraph.CompiledModule:
    """Assert that the compiled module trains as eager does, and keeps its budget in every step."""
    expected = trained(copy.deepcopy(module), calls)
    compiled = memgraph.compile(module, budget, offload=None, accumulate=False)
    found = trained(module, calls, compiled)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    for report in compiled.plans:
        assert report.peak <= report.budget
        assert report.measured is not None and report.measured <= report.peak
    return compiled
