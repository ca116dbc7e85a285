"""A step is kept as long as the parameters that it trains are those of the module."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from tests.support.compare import ROOM, batch
from tests.support.models import Net


@pytest.mark.parametrize("counted", [True, False])
def test_parameters_that_were_replaced_are_freed(counted: bool) -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = memgraph.compile(model, ROOM, optimizer=optimizer if counted else None)
    _train(compiled, optimizer)
    old = _replace(compiled, other, optimizer)
    _train(compiled, optimizer)
    assert not [reference for reference in old if reference() is not None]
    assert len(compiled.plans) == 1


def test_parameters_whose_states_are_on_disk_are_freed_when_they_are_replaced() -> None:
    model, other = (nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters())
    x, offloaded = torch.ones(8, 256), 2 * 256 * 256 * 4
    peak = memgraph.plan(model, x, optimizer=optimizer).peak
    compiled: Any = memgraph.compile(model, peak - offloaded, optimizer=optimizer, time_limit=1)
    _train(compiled, optimizer, x)
    assert compiled._planner.state.update.offloaded_owners
    old = _replace(compiled, other, optimizer)
    _train(compiled, optimizer, x)
    assert not [reference for reference in old if reference() is not None]
    assert compiled._planner.state.update.offloaded_owners <= set(compiled.parameters())


def test_a_step_stays_while_a_call_has_other_parameters() -> None:
    compiled: Any = memgraph.compile(Net(), ROOM)
    compiled(batch()).sum().backward()
    (step,) = compiled._kept.steps
    others = {name: value.detach().clone().requires_grad_() for name, value in compiled.named_parameters()}
    loss = torch.func.functional_call(compiled, others, (batch(),)).sum()
    torch.autograd.grad(loss, list(others.values()))
    compiled.zero_grad()
    compiled(batch()).sum().backward()
    assert step.parts.halves in [kept.parts.halves for kept in compiled._kept.steps]


def _train(compiled: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None) -> None:
    for _ in range(2):
        compiled(batch() if x is None else x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _replace(
    compiled: nn.Module, other: nn.Module, optimizer: torch.optim.Optimizer
) -> list[weakref.ref[nn.Parameter]]:
    old = [weakref.ref(parameter) for parameter in compiled.parameters()]
    compiled.load_state_dict(other.state_dict(), assign=True)
    optimizer.param_groups[0]["params"] = list(compiled.parameters())
    optimizer.state.clear()
    return old
