"""A trial says how finely the step of an optimizer may be cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from memgraph.optim.trial_copy import parts_of
from memgraph.optim.update_unit import UpdateUnit, unit_of, unsupported_reason
from tests.support.other_optimizers import Clipping, Counting, Nested, Own, Telling, muon_and_adamw
from tests.support.streamed_state import Optimizer


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 128), nn.Linear(128, 96), nn.LayerNorm(96))


UNITS: dict[str, tuple[Optimizer, str]] = {
    "AdamW": (optim.AdamW, "element"),
    "AdamW, differentiable": (partial(optim.AdamW, differentiable=True), "all"),
    "Adafactor": (optim.Adafactor, "parameter"),
    "a class that extends AdamW": (Own, "parameter"),
    "states in lists and dicts": (Nested, "parameter"),
    "counts in its groups": (Counting, "all"),
    "clips the norm of all": (partial(Clipping, lr=0.1), "all"),
    "an object of it counts": (Telling, "all"),
    "LBFGS": (optim.LBFGS, "all"),
    "SparseAdam": (optim.SparseAdam, "all"),
}


@pytest.mark.parametrize("name", UNITS)
def test_the_unit_of_an_optimizer(name: str) -> None:
    make, unit = UNITS[name]
    module = net()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = make(module.parameters())
    state = torch.get_rng_state()
    assert unit_of(optimizer).value == unit
    assert all(map(torch.equal, before, module.parameters()))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not optimizer.state
    assert torch.equal(state, torch.get_rng_state())


def test_a_chain_has_the_units_of_its_parts() -> None:
    chain = muon_and_adamw(net().parameters())
    assert [unit_of(part).value for part in parts_of(chain)] == ["parameter", "element"]
    assert unsupported_reason(chain, lambda parameter: True) is None


class Switched(optim.SGD):
    """Averages the gradients of all parameters, if it is told to."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.averages = False

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        mean = torch.stack([gradient.mean() for gradient in gradients]).mean()
        for gradient in gradients if self.averages else ():
            gradient.fill_(mean)
        return super().step(closure)


def test_an_attribute_that_changes_is_tried_again() -> None:
    optimizer = Switched(net().parameters())
    assert unit_of(optimizer) is UpdateUnit.PARAMETER
    optimizer.averages = True
    assert unit_of(optimizer) is UpdateUnit.ALL
    reason = unsupported_reason(optimizer, lambda parameter: True)
    assert reason is not None
    assert reason.startswith("Switched does not update a parameter alone as it does among others")
