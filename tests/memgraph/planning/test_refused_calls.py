"""A call that no plan fits is refused without running the model, and without attempts that could not spare bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import memgraph
from memgraph.planning.attempts import attempts
from memgraph.planning.capture_step import capture_step
from memgraph.slices.step_cuts import Cuts


class Words(nn.Module):
    """A table of words, and layers whose activations grow with the batch."""

    def __init__(self, words: int = 4096) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, 64)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)))
        self.ran: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            self.ran.append(x)
        return self.layers(self.embed(x)).square().mean()


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The level of blocks in each attempt."""
    found: list[int] = []

    def captured(*given: Any, cuts: Cuts, **rest: Any) -> Any:
        found.append(cuts.level)
        return capture_step(*given, cuts=cuts, **rest)

    monkeypatch.setattr(attempts, "capture_step", captured)
    return found


def refused(model: nn.Module, rows: int, budget: int) -> memgraph.BudgetError:
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.compile(model, budget, time_limit=0)(torch.zeros(rows, 32, dtype=torch.long))
    return caught.value


def test_a_refusal_runs_no_model_and_names_what_acts_on_the_largest_kinds() -> None:
    model = Words(64)
    said = str(refused(model, 256, 1_000_000))
    assert model.ran == []
    assert "Most of that is activation" in said or "Most of that is temporary" in said
    assert "smaller batches, whose gradients add up, or microbatches=" in said


def test_a_loop_that_halves_its_batch_gets_a_budget_that_works_each_time() -> None:
    model, smallest = Words(64), []
    for rows in (256, 128, 64):
        error = refused(model, rows, 1_000_000)
        memgraph.compile(Words(64), error.smallest, time_limit=0)(torch.zeros(rows, 32, dtype=torch.long)).backward()
        smallest.append(error.smallest)
    assert smallest == sorted(smallest, reverse=True)
    assert model.ran == []


def test_weights_come_in_blocks_only_where_that_could_spare_bytes(levels: list[int]) -> None:
    refused(Words(64), 256, 1_000_000)
    assert levels == [0]
    levels.clear()
    refused(Words(), 4, 400_000)  # the table has a megabyte
    assert levels[:2] == [0, 1]
