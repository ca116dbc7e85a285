"""Requests for slices: wrong arguments and submodules without a chain are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from tests.support.sliced_models import VOCABULARY, WIDTH, Mixers
from tests.support.sliced_training import ROOM, beside_eager, headed, step


@pytest.mark.parametrize(
    "slices", ["yes", 3, True, {"head": 1}, {"head": True}, {"head": 2.0}, {3: 2}, ["head"]], ids=str
)
def test_wrong_arguments_are_refused(slices: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"slices.*lm_head"):
        memgraph.compile(headed(), ROOM, slices=slices)


@pytest.mark.parametrize(
    "slices, why",
    [
        ({"nothing": 2}, "slices has 'nothing', which is no submodule"),
        ({"drop": 2}, "slices has 'drop', which has no ops left that can run in parts"),
        ({"norm": 2}, "slices has 'norm', which has no ops left that can run in parts"),
    ],
)
def test_a_submodule_that_has_no_chain_is_named(slices: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        step(memgraph.compile(headed(), ROOM, slices=slices))


def mixed(model: Any) -> Tensor:
    loss = model(torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1)))
    loss.backward()
    return loss.detach()


@pytest.mark.long
@pytest.mark.parametrize("slices", [{"up.0": 2, "down.0": 3}, {"down.0": 3, "up.0": 2}], ids=str)
def test_a_submodule_is_cut_in_what_those_before_it_left_whole(slices: Any) -> None:
    """The chain of the first layer reaches through all layers but for a sum, which the second one still has."""
    torch.manual_seed(0)
    first, second = beside_eager(Mixers(), mixed, budget=ROOM, slices=slices).plan.slices
    assert (first.parts, second.parts) == (2, 3) and first.rule.keys().isdisjoint(second.rule)


@pytest.mark.parametrize("slices", [{"up.0": 2, "up": 2}, {"up": 2, "up.0": 2}], ids=str)
def test_a_submodule_of_which_nothing_is_left_whole_is_named_with_the_one_that_has_its_ops(slices: Any) -> None:
    torch.manual_seed(0)
    why = r"slices has 'up.0', which has no ops left that can run in parts: they run with those of 'up'; leave it out"
    with pytest.raises(ValueError, match=why):
        mixed(memgraph.compile(Mixers(), ROOM, slices=slices))


class Topped(Mixers):
    """The same layers below a head, whose values are larger."""

    def __init__(self) -> None:
        super().__init__(times=4)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return self.head(x).logsumexp(-1).mean()


@pytest.mark.long
def test_the_order_in_which_submodules_are_given_plays_no_part() -> None:
    made = []
    for slices in ({"up.1": 2, "head": 4}, {"head": 4, "up.1": 2}):
        torch.manual_seed(0)
        made.append(beside_eager(Topped(), mixed, budget=ROOM, slices=slices).plan.slices)
    assert made[0] == made[1] and [cut.parts for cut in made[0]] == [4, 2]


@pytest.mark.long
def test_there_are_no_more_parts_than_rows() -> None:
    model = memgraph.compile(headed(), ROOM, slices={"head": 10**6}, offload=None, time_limit=0)
    x, labels = torch.arange(12).view(2, 6), torch.arange(12).view(2, 6)
    model(x, labels).backward()
    (cut,) = model.plan.slices
    assert (cut.parts, len(cut.part_rows)) == (12, 12)
    assert "12 rows in 12 parts" in str(model.plan) and str(cut) in model.plan.to_json()


def test_the_smallest_number_of_parts_is_said() -> None:
    with pytest.raises(ValueError, match="numbers of parts, 2 to 1048576"):
        memgraph.compile(headed(), ROOM, slices={"head": 1})
