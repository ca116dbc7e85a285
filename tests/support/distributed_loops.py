"""Training loops of users. Each takes a model, its optimizer, a function that returns the next batch, and the module.

train(model, optimizer, batch, steps=3, times=2)     two backwards for each of three steps
frozen(model, optimizer, batch, module)              a part of the module is frozen for a step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn, optim


def train(
    model: nn.Module, optimizer: optim.Optimizer, batch: Callable[[], Tensor], steps: int = 3, times: int = 1
) -> None:
    for _ in range(steps):
        for _ in range(times):
            model(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def twice(model: Any, optimizer: Any, batch: Any, module: nn.Module) -> None:
    """Call step twice after one backward."""
    model(batch()).backward()
    optimizer.step()
    optimizer.step()


def frozen(model: Any, optimizer: Any, batch: Any, module: Any) -> None:
    """Freeze a part of the module for one step."""
    for trained in (False, True):
        module.first.requires_grad_(trained)
        train(model, optimizer, batch, 1)


def hooked(model: Any, optimizer: Any, batch: Any, module: Any) -> None:
    """Change a gradient in a hook for two steps."""
    handle = module.last.weight.register_hook(lambda gradient: gradient * 2)
    train(model, optimizer, batch, 2)
    handle.remove()
    train(model, optimizer, batch, 1)
