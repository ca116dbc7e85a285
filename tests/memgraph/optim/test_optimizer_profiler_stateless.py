"""An optimizer whose step creates no states, as torch 2.11's Adagrad, whose constructor has created them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.optim.host_step import host_update_rate
from memgraph.optim.optimizer_profiler import update_nbytes
from memgraph.optim.trained_parameters import movable_states
from memgraph.tensors.parameter_groups import state_tensors

PLAIN: Any = optim.Adagrad._init_group


class Own(optim.Adagrad):
    pass


def as_in_2_11(optimizer: optim.Adagrad, group: dict[str, Any], *lists: Any) -> Any:
    for parameter in group["params"]:
        if parameter.grad is not None and "sum" not in optimizer.state[parameter]:
            raise KeyError("sum")
    return PLAIN(optimizer, group, *lists)


def square(y: Tensor) -> Tensor:
    return y.square().mean()


@pytest.mark.long
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("wishes", [{}, {"fuse_update": True}], ids=["at the end", "in backward"])
def test_a_step_that_makes_no_states_is_planned_and_trains(
    fused: bool | None, wishes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim.Adagrad, "_init_group", as_in_2_11)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = (optim.Adagrad(model.parameters(), lr=0.01, fused=fused) for model in models)
    step = memgraph.compile(models[0], 1 << 28, optimizer=ours, loss=square, **wishes)
    for _ in range(3):
        x = torch.randn(8, 32)
        for optimizer, found in ((ours, step(x)), (theirs, square(models[1](x)))):
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert step.plan.measured is not None and step.plan.measured <= step.plan.peak
    states = sum(op.nbytes for op in step.plan.forecast.trace.ops if op.fn == "state")
    assert states == sum(state.nbytes for state in state_tensors(ours))


@pytest.mark.parametrize("fused", [None, True])
def test_the_host_steps_it_to_find_how_long_that_takes(fused: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.Adagrad, "_init_group", as_in_2_11)
    parameter = nn.Parameter(torch.ones(256, 256))
    optimizer = optim.Adagrad([("w", parameter)], lr=0.01, fused=fused)
    assert host_update_rate(optimizer, movable_states(optimizer), 1 << 12) > 0


def test_one_that_is_derived_from_it_begins_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.Adagrad, "_init_group", as_in_2_11)
    parameters = list(nn.Linear(32, 64).parameters())
    assert update_nbytes(Own(parameters)) == update_nbytes(optim.Adagrad(parameters))
