"""The attributes that an optimizer keeps beside its groups and states are there in trials and in windows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.errors import FusedError
from memgraph.optim.optimizer_profiler import update_nbytes
from memgraph.optim.update_unit import UpdateUnit, shared_change, unit_of, unsupported_reason
from tests.support.smallest_budget import smallest_of
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


@pytest.mark.long
@pytest.mark.usefixtures("small_windows")
def test_it_streams_and_is_eagers() -> None:
    model = chain(2)
    with pytest.raises(memgraph.BudgetError) as error:
        memgraph.plan(model, batch(), budget=1, optimizer=Momentum(model.parameters()), loss=loss, time_limit=0)
    budget = int(error.value.smallest * 1.05)
    twins = Twins(lambda: chain(2), None, budget=budget, optimizer=lambda model: Momentum(model.parameters()))
    twins.turns(partial(train, x=batch()), 2)
    assert "state" in far(twins.module, twins.ours)


@pytest.mark.parametrize("first", [0, torch.tensor(0), [0], {"each": {"calls": 0}}, True, "0"], ids=str)
def test_what_a_step_changes_beside_its_states_is_not_run_in_windows(first: Any) -> None:
    optimizer, before = counting(first), str(first)
    assert shared_change(optimizer) == "Counting.calls is another after a step"
    reason = unsupported_reason(optimizer, lambda parameter: True)
    assert reason is not None and reason.startswith("Counting.calls is another after a step")
    assert unit_of(optimizer) is UpdateUnit.ALL and str(optimizer.calls) == before


def test_nor_what_it_changes_in_the_options() -> None:
    class Counted(Momentum):
        pointwise = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
            super().step()

    optimizer = Counted([nn.Parameter(torch.ones(2))])
    assert shared_change(optimizer) == "Counted.param_groups is another after a step"
    assert "calls" not in optimizer.param_groups[0]


def test_nor_is_it_updated_in_backward_one_parameter_after_the_other() -> None:
    """Each would be stepped on by a twin, and what that has counted be gone with it."""
    model = nn.Linear(4, 4)
    with pytest.raises(FusedError, match=r"Counting.calls is another after a step, .*, or compile without fuse_update"):
        memgraph.compile(model, 10**8, optimizer=Counting(model.parameters()), fuse_update=True, time_limit=0)
    memgraph.compile(model, 10**8, optimizer=Momentum(model.parameters()), fuse_update=True, time_limit=0)


@pytest.mark.parametrize("kind", FUSED)
def test_flags_that_torchs_own_step_sets_do_not_count(kind: Any) -> None:
    class Derived(kind):  # type: ignore[misc]
        pointwise = True

    assert unit_of(Derived([nn.Parameter(torch.ones(2))], fused=True)) is UpdateUnit.ELEMENT


def test_its_own_tensors_are_not_copied_for_an_update_in_backward() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    optimizer = Momentum(model.parameters())
    optimizer.rates |= {f"more {i}": torch.tensor(0.5) for i in range(1000)}
    compiled = memgraph.compile(model, 10**8, optimizer=optimizer, loss=torch.sum, time_limit=0, fuse_update=True)
    for _ in range(2):
        compiled(torch.ones(1, 256)).backward()
        optimizer.step()
    assert_kept(compiled, 10**8)


class LayerRates(optim.Optimizer):
    """Rates by the place of a parameter in its group, as layer-wise learning rates are written; it may fail at one."""

    fails_at: int | None = None

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.rates = [1.0 if i < 6 else 0.1 for i in range(len(self.param_groups[0]["params"]))]
        self.param_groups[0]["means"] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for i, (parameter, rate) in enumerate(zip(group["params"], self.rates, strict=True)):
            if parameter.grad is not None:
                if i == self.fails_at:
                    raise ArithmeticError("at a place")
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_(mean.mul_(0.9).add_(parameter.grad), alpha=group["lr"] * rate)


@pytest.mark.usefixtures("small_windows")
def test_a_rule_by_places_is_eagers() -> None:
    def plan() -> object:
        model = chain(8)
        return memgraph.plan(
            model, batch(), budget=1, optimizer=LayerRates(model.parameters()), loss=loss, time_limit=0
        )

    budget = int(smallest_of(plan) * 1.05)
    twins = Twins(lambda: chain(8), None, budget=budget, optimizer=lambda model: LayerRates(model.parameters()))
    twins.turns(partial(train, x=batch()), 2)
    assert "state" in far(twins.module, twins.ours)
    assert isinstance(twins.ours, LayerRates)
    twins.ours.fails_at = 7
    with pytest.raises(ArithmeticError, match="at a place"):
        twins.turns(partial(train, x=batch()), 1)


class KeepsInGroup(LayerRates):
    """States in a dict of its group, which trials must not write into."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        means = self.param_groups[0]["means"]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                mean = means.setdefault(id(parameter), torch.zeros_like(parameter))
                parameter.data.sub_(mean.mul_(0.9).add_(parameter.grad), alpha=0.1)


def test_states_in_an_option_are_counted_and_no_trial_adds_to_them() -> None:
    model = chain(4)
    optimizer = KeepsInGroup(model.parameters())
    states, _ = update_nbytes(optimizer)
    assert states >= sum(parameter.nbytes for parameter in model.parameters())
    assert not optimizer.param_groups[0]["means"]


class FailsLater(LayerRates):
    fails: bool = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fails and self.param_groups[0]["params"]:
            raise ArithmeticError("later")
        super().step()


@pytest.mark.usefixtures("small_windows")
def test_an_error_of_a_later_step_is_its_own() -> None:
    def plan() -> object:
        model = chain(4)
        return memgraph.plan(
            model, batch(), budget=1, optimizer=FailsLater(model.parameters()), loss=loss, time_limit=0
        )

    model = chain(4)
    optimizer = FailsLater(model.parameters())
    compiled = memgraph.compile(model, int(smallest_of(plan) * 1.05), optimizer=optimizer, loss=loss, time_limit=0)
    compiled(batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    compiled(batch()).backward()
    optimizer.fails = True
    with pytest.raises(ArithmeticError, match="later"):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()


class ReadsAll(LayerRates):
    """Reads every gradient without a look, as loops where all parameters have one may be written."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            parameter.data.sub_(mean.mul_(0.9).add_(parameter.grad), alpha=0.1)


@pytest.mark.usefixtures("small_windows")
def test_a_step_that_reads_every_gradient_has_its_parameter_alone() -> None:
    def plan() -> object:
        model = chain(4)
        return memgraph.plan(model, batch(), budget=1, optimizer=ReadsAll(model.parameters()), loss=loss, time_limit=0)

    budget = int(smallest_of(plan) * 1.05)
    twins = Twins(lambda: chain(4), None, budget=budget, optimizer=lambda model: ReadsAll(model.parameters()))
    twins.turns(partial(train, x=batch()), 2)
    assert "state" in far(twins.module, twins.ours)
