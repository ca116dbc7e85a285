"""Trainings whose updates run in backward."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
from torch import Tensor, nn

import memgraph
from tests.support.streamed_state import OPTIMIZERS, TINY, Twins, batch, chain, loss

ROOM = 10**9
fused = partial(Twins, fuse_update=True)


def train(model: nn.Module, optimizer: Any, run: Any, x: Tensor | None = None) -> Tensor:
    """Run a step that leaves no gradients."""
    made = run(model, batch() if x is None else x)
    made.backward()
    if isinstance(model, memgraph.CompiledModule):
        assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    return made.detach()


def steps(twins: Twins, count: int = 5) -> None:
    for seed in range(count):
        twins.step(partial(train, x=batch(seed)))


@cache
def smallest(kind: str = "adamw", fuse_update: bool = True) -> int:
    """Return about the smallest budget."""
    model = chain()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with pytest.raises(memgraph.BudgetError) as caught:
        given: dict[str, Any] = {"optimizer": optimizer, "loss": loss, "time_limit": 0, "fuse_update": fuse_update}
        memgraph.plan(model, batch(), budget=TINY, **given)
    return int(caught.value.smallest * 1.05)
