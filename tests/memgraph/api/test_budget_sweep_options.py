"""A sweep takes what `compile` takes, and means the same by it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from tests.support.models import batch, net


def test_all_that_compile_takes_is_taken() -> None:
    taken = {name: set(inspect.signature(getattr(memgraph, name)).parameters) for name in ("compile", "plan", "sweep")}
    assert taken["compile"] - taken["plan"] == {"strict"}  # of the steps that run
    assert taken["plan"] - taken["sweep"] == {"budget", "plan"}
    assert taken["sweep"] - taken["plan"] == {"budgets"}


@pytest.mark.long
def test_updates_in_backward() -> None:
    model = net()
    options: dict[str, Any] = {"optimizer": torch.optim.Adam(model.parameters()), "loss": nn.functional.mse_loss}
    options |= {"target": batch(), "time_limit": 0}
    inside = memgraph.sweep(model, batch(), budgets=["1GB", 1], fuse_update=True, **options)
    assert inside.needs == memgraph.plan(model, batch(), budget="1GB", fuse_update=True, **options).peak
    found = memgraph.plan(model, batch(), budget=inside.smallest, fuse_update=True, **options)
    assert found.peak <= inside.smallest


def test_updates_in_backward_are_refused_as_in_compile() -> None:
    model = net()
    with pytest.raises(ValueError, match="give optimizer="):
        memgraph.sweep(model, batch(), fuse_update=True)
    with pytest.raises(memgraph.FusedError, match="wants the loss in the step"):
        memgraph.sweep(model, batch(), fuse_update=True, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="lower='cuda'"):
        memgraph.sweep(model, batch(), lower="cuda")
