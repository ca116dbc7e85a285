"""Steps on several ranks are the plain optimizer's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from tests.support.ranks import on_ranks


class Counting(optim.Optimizer):
    """One of the caller's that counts its steps beside its states."""

    pointwise = True

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / self.calls)


KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adam": (optim.Adam, {}),
    "AdamW": (optim.AdamW, {"weight_decay": 0.1}),
    "SGD": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (optim.RMSprop, {}),
    "Adagrad": (optim.Adagrad, {}),
    "Adadelta": (optim.Adadelta, {}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "Adamax": (optim.Adamax, {}),
    "ASGD": (optim.ASGD, {}),
    "Rprop": (optim.Rprop, {}),
    "Adafactor": (optim.Adafactor, {}),
}
OWN: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {"Counting": (Counting, {})}
FUSED: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    name: (KINDS[name][0], {"fused": True, "lr": 0.01}) for name in ("Adam", "AdamW", "Adagrad")
}
FUSED["SGD"] = (optim.SGD, {"fused": True, "lr": 0.01, "momentum": 0.9})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups, one parameter in turn to each."""
    parameters = list(module.parameters())
    return [{"params": parameters[::2], "lr": 0.01}, {"params": parameters[1::2], "lr": 0.03}]


def train(module: nn.Module, optimizer: optim.Optimizer, steps: int = 4) -> list[Tensor]:
    batches = torch.Generator().manual_seed(1)
    for _ in range(steps):
        module(torch.randn(4, 11, generator=batches)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in module.parameters()]


def _steps(rank: int, gradients: str) -> list[str]:
    wrong = []
    for name, (kind, options) in (KINDS | OWN).items():
        plain, ours = net(), net()
        wanted = train(plain, kind(groups(plain), **options), steps=7)
        found = train(ours, memgraph.OSS(groups(ours), kind, gradients=gradients, **options), steps=7)
        wrong += [name] if not all(map(torch.equal, wanted, found)) else []
    return wrong


def _fused(rank: int) -> list[str]:
    """Kernels that take a rest by itself, on parameters whose ends are in the middle of buckets."""
    wrong = []
    for name, (kind, options) in FUSED.items():
        for size in range(101, 1300, 97):
            torch.manual_seed(size)
            plain = [nn.Parameter(torch.randn(count)) for count in (size, 77, size + 5)]
            ours = [nn.Parameter(p.detach().clone()) for p in plain]
            optimizers = kind(plain, **options), memgraph.OSS(ours, kind, gradients="same", **options)
            for _ in range(5):
                for p, q in zip(plain, ours, strict=True):
                    p.grad = torch.randn_like(p)
                    q.grad = p.grad.clone()
                for optimizer in optimizers:
                    optimizer.step()
            wrong += [f"{name} {size}"] if not all(map(torch.equal, plain, ours)) else []
    return wrong


@pytest.mark.long
def test_fused_kernels_step_as_alone() -> None:
    assert on_ranks(3, _fused) == [[]] * 3


@pytest.mark.long
def test_twelve_optimizers_over_two_groups_step_as_alone() -> None:
    for ranks in (1, 2):
        assert on_ranks(ranks, _steps, "average") == [[]] * ranks
    assert on_ranks(3, _steps, "same") == [[]] * 3
