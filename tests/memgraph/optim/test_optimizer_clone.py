"""A clone of an optimizer, in profiles and windows, has the attributes that it keeps beside its groups and states."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.errors import FusedError, UpdateError
from memgraph.optim.elementwise import ELEMENTWISE
from memgraph.optim.optimizer_clone import ClonedOptimizer, clone_optimizer
from tests.support.streamed_state import Twins, assert_kept, batch, chain, far, loss, train

FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)


class Momentum(optim.Optimizer):
    pointwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.rates: dict[str, Any] = {"kept": 0.9, "added": torch.tensor(0.5)}
        self.calls: Any = 0
        self.owned = self.parameters()

    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (one for one in self.parameters() if one.grad is not None):
            assert parameter.grad is not None
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            parameter.sub_(mean.mul_(self.rates["kept"]).add_(parameter.grad * self.rates["added"]), alpha=0.1)


class Counting(Momentum):
    pointwise = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls = another(self.calls)
        super().step()


def another(value: Any) -> Any:
    """Changed in place, if that can be."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            value[key] = another(value[key])
        return value
    if isinstance(value, Tensor):
        return value.add_(1)
    return value + "1" if isinstance(value, str) else not value if isinstance(value, bool) else value + 1


def counting(first: Any) -> Counting:
    optimizer = Counting([nn.Parameter(torch.ones(2))])
    optimizer.calls = first
    return optimizer


@pytest.mark.usefixtures("small_windows")
def test_it_streams_and_is_eagers() -> None:
    model = chain(2)
    with pytest.raises(memgraph.BudgetError) as error:
        memgraph.plan(model, batch(), budget=1, optimizer=Momentum(model.parameters()), loss=loss, time_limit=0)
    budget = int(error.value.smallest * 1.05)
    twins = Twins(lambda: chain(2), None, budget=budget, optimizer=lambda model: Momentum(model.parameters()))
    twins.turns(partial(train, x=batch()), 2)
    assert "state" in far(twins.module, twins.ours)


def test_a_clone_has_scalars_of_its_own_and_reaches_nothing_of_the_original() -> None:
    first: Any = Momentum([nn.Parameter(torch.ones(2))])
    first.inner = optim.SGD(first.parameters(), lr=0.1)
    one: Any = clone_optimizer(first, [], {})
    assert one.rates == first.rates
    assert one.rates["added"] is not first.rates["added"]
    assert not hasattr(one, "owned")  # these are parameters
    assert not hasattr(one, "inner")
    assert "differentiable" not in first.defaults


@pytest.mark.parametrize("first", [0, torch.tensor(0), [0], {"each": {"calls": 0}}, True, "0"], ids=str)
def test_what_a_step_changes_beside_its_states_is_not_run_in_windows(first: Any) -> None:
    optimizer, before = counting(first), str(first)
    with pytest.raises(UpdateError, match=r"Counting.calls is another after a step, .*; keep it in the state of each"):
        ClonedOptimizer(optimizer).state_dtypes(0, torch.float32)
    assert str(optimizer.calls) == before


def test_nor_is_it_updated_in_backward_one_parameter_after_the_other() -> None:
    """Each would be stepped on by a twin, and what that has counted be gone with it."""
    model = nn.Linear(4, 4)
    with pytest.raises(FusedError, match=r"Counting.calls is another after a step, .*, or compile without fuse_update"):
        memgraph.compile(model, 10**8, optimizer=Counting(model.parameters()), fuse_update=True, time_limit=0)
    memgraph.compile(model, 10**8, optimizer=Momentum(model.parameters()), fuse_update=True, time_limit=0)


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_flags_that_torchs_own_step_sets_do_not_count(kind: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    for optimizer in [kind([parameter]), *([kind([parameter], fused=True)] if kind in FUSED else [])]:
        ClonedOptimizer(optimizer).state_dtypes(0, torch.float32)


def test_what_a_clone_copies_is_in_the_forecast_of_an_update_in_backward() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    optimizer = Momentum(model.parameters())
    optimizer.rates |= {f"more {i}": torch.tensor(0.5) for i in range(1000)}
    compiled = memgraph.compile(model, 10**8, optimizer=optimizer, loss=torch.sum, time_limit=0, fuse_update=True)
    for _ in range(2):
        compiled(torch.ones(1, 256)).backward()
        optimizer.step()
    assert_kept(compiled, 10**8)
