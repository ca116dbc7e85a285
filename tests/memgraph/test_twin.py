"""An optimizer that keeps something beside its groups and states is tried, and run in windows, with what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.errors import UpdateError
from memgraph.stepper import Stepper
from memgraph.twin import twin
from tests.streamed import Twins, batch, chain, far, loss, streams


class Momentum(optim.Optimizer):
    pointwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.rates: dict[str, Any] = {"kept": 0.9, "added": torch.tensor(0.5)}
        self.calls, self.owned = 0, self.parameters()

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
        self.calls += 1
        super().step()


def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
    optimizer.zero_grad()
    made: Tensor = run(model, batch())
    made.backward()
    optimizer.step()
    return made.detach()


@pytest.mark.usefixtures("small_windows")
def test_it_streams_and_is_eagers() -> None:
    model = chain(2)
    with pytest.raises(memgraph.BudgetError) as error:
        memgraph.plan(model, batch(), budget=1, optimizer=Momentum(model.parameters()), loss=loss, time_limit=0)
    budget = int(error.value.smallest * 1.05)
    twins = Twins(lambda: chain(2), None, budget=budget, optimizer=lambda model: Momentum(model.parameters()))
    for _ in range(2):
        theirs, ours = twins.each(step)
        assert torch.equal(theirs, ours)
        assert all(map(torch.equal, twins.module.parameters(), twins.plain.parameters()))
    assert streams(twins.model)
    assert "state" in far(twins.module, twins.ours)


def test_a_twin_has_numbers_of_its_own_and_reaches_nothing_of_the_first() -> None:
    first: Any = Momentum([nn.Parameter(torch.ones(2))])
    first.inner = optim.SGD(first.parameters(), lr=0.1)
    one: Any = twin(first, [], {})
    assert one.rates == first.rates
    assert one.rates["added"] is not first.rates["added"]
    assert not hasattr(one, "owned")  # these are parameters
    assert not hasattr(one, "inner")
    assert "differentiable" not in first.defaults


def test_what_counts_in_an_attribute_is_not_run_in_windows() -> None:
    first = Counting([nn.Parameter(torch.ones(2))])
    with pytest.raises(UpdateError, match=r"Counting.calls is another after a step, .*; keep it in the state of each"):
        Stepper(first).entries(0, torch.float32)
    assert first.calls == 0
