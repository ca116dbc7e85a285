"""Parameters that forward writes to, under budgets that offload what can be offloaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph

SIZE = 256


class Momentum(nn.Module):
    """A trained layer and others, whose parameters forward scales before it uses them."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.written = nn.ModuleList(nn.Linear(SIZE, SIZE).requires_grad_(trained) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in self.written:
            with torch.no_grad():
                weight: Any = layer.weight
                weight.mul_(0.9)
            y = y + layer(y).relu()
        return y.square().mean()


@pytest.mark.long
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_what_forward_writes_to_a_parameter_lasts_however_small_the_budget(trained: bool, fused: bool) -> None:
    torch.manual_seed(0)
    plain = Momentum(trained)
    ours = copy.deepcopy(plain)
    x = torch.randn(8, SIZE)
    optimizer: Any = torch.optim.AdamW(ours.parameters())
    theirs = torch.optim.AdamW(plain.parameters())
    options = {"optimizer": optimizer, "fuse_update": fused, "accumulate": False, "time_limit": 1}
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(ours, x, budget=100_000, **options)
    model = memgraph.compile(ours, caught.value.smallest, **options)
    for _ in range(3):
        for module, steps in ((plain, theirs), (model, optimizer)):
            module(x).backward()
            steps.step()
            steps.zero_grad()
    assert model.plan.plan, "nothing was offloaded, so nothing was shown"
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name
