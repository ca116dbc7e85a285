"""A parameter that a step does not use is offloaded if the plan says so, and reloaded when another step needs it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.storage.mapped_storage import is_offloaded
from tests.support.streamed_state import ADAMW, WIDTH, batch, chain, loss, streamed


class Heads(nn.Module):
    """One head of many is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = chain(2)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        out: Tensor = self.heads[head](self.trunk(x))
        return out


@pytest.mark.long
@pytest.mark.parametrize("grad", [True, False])
def test_unused_parameters_are_offloaded_and_the_budget_is_kept(grad: bool) -> None:
    model = Heads()
    with torch.set_grad_enabled(grad):
        with pytest.raises(memgraph.BudgetError) as caught:
            memgraph.plan(model, batch(), budget=1, loss=loss, time_limit=0)
        compiled = streamed(model, int(caught.value.smallest))

        def step() -> None:
            made = compiled(batch())
            if grad:
                made.backward()
            model.zero_grad()

        for _ in range(3):
            step()
        assert is_offloaded(model.get_parameter("heads.1.weight"))
        there = resident_bytes([*model.parameters(), batch()])
        _, allocated = measure_peak(step)
    report = compiled.plan
    staging = int(report.forecast.by_kind["staging"].max(initial=0))
    assert allocated is not None
    assert there + allocated.peak + staging <= report.peak + batch().nbytes  # the step's own batch was made in it
    assert report.peak <= report.budget


@pytest.mark.long
def test_it_is_trained_when_its_turn_comes() -> None:
    ours = Heads()
    plain, optimizer = copy.deepcopy(ours), ADAMW(ours.parameters())
    theirs = ADAMW(plain.parameters())
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(ours, batch(), budget=1, optimizer=optimizer, loss=loss, time_limit=0)
    compiled = streamed(ours, int(caught.value.smallest * 1.2), optimizer=optimizer)
    for head in (0, 1):
        loss(plain(batch(), head)).backward()
        compiled(batch(), head).backward()
        for each in (theirs, optimizer):
            each.step()
            each.zero_grad()
        assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    ours.get_parameter("heads.1.weight").data = ours.get_parameter("heads.1.weight").detach().clone()
    compiled(batch())
    assert is_offloaded(ours.get_parameter("heads.1.weight"))
