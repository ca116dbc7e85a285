"""Optimizers of every kind, and a small net for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn, optim

ROOM = "1GB"
Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01),
    "RMSprop centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


def net() -> nn.Module:
    """Return a net with parameters of several sizes, and a frozen one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 64))
    module.register_parameter("frozen", nn.Parameter(torch.ones(7), requires_grad=False))
    return module


def square(result: Tensor) -> Tensor:
    return result.square().mean()


def batch() -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(5))


def step(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
