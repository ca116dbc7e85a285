"""Parameters that the optimizer is given after `compile` are counted, streamed and updated like those before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from tests.support.streamed_state import Twins, batch, chain, loss, streams, tightest

ROOM = 10**9


def first(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model[0].parameters(), lr=1e-2)


def add(twins: Twins) -> None:
    """The rest of the parameters, with a rate of their own."""
    for model, optimizer in ((twins.plain, twins.theirs), (twins.module, twins.ours)):
        optimizer.add_param_group({"params": list(model[2:].parameters()), "lr": 1e-3})  # type: ignore[index]


@pytest.mark.long
@pytest.mark.parametrize("fuse_update", [False, True])
def test_what_is_added_is_counted(fuse_update: bool) -> None:
    module: Any = chain(3)
    optimizer = first(module)
    model = memgraph.compile(module, ROOM, optimizer=optimizer, loss=loss, fuse_update=fuse_update)
    model(batch()).backward()
    before = model.plan.forecast.by_kind["state"].max()
    optimizer.step()
    model.zero_grad()
    optimizer.add_param_group({"params": list(module[2:].parameters())})
    model(batch()).backward()
    assert model.plan.forecast.by_kind["state"].max() > 2.9 * before
    optimizer.step()
    assert model.plan.measured is not None
    assert model.plan.measured <= model.plan.peak


@pytest.mark.long
def test_a_group_that_is_added_between_steps_streams_and_is_updated() -> None:
    twins = Twins(optimizer=first, budget=tightest() + (1 << 18))
    for turn in range(4):
        if turn == 2:
            add(twins)
        twins.step(seed=turn)
    assert streams(twins.model)


def test_a_layer_that_is_appended_is_planned_and_updated() -> None:
    twins = Twins(budget=ROOM)
    twins.step()
    for model, optimizer in ((twins.plain, twins.theirs), (twins.module, twins.ours)):
        torch.manual_seed(1)
        layer = nn.Linear(256, 256)
        model.append(layer)  # type: ignore[operator]
        optimizer.add_param_group({"params": list(layer.parameters())})
    for seed in range(2):
        twins.step(seed=seed)
