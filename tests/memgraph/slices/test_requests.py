"""Requests for slices: wrong arguments and submodules without a chain are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import memgraph
from tests.support.sliced_models import Mixers
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


def test_a_submodule_is_cut_in_what_those_before_it_left_whole() -> None:
    """The chain of the first layer reaches through all layers but for a sum, which the second one still has."""
    torch.manual_seed(0)
    first, second = beside_eager(Mixers(), mixed, budget=ROOM, slices={"up.0": 2, "down.0": 3}).plan.slices
    assert (first.parts, second.parts) == (2, 3) and first.rule.keys().isdisjoint(second.rule)


@pytest.mark.parametrize("slices", [{"up.0": 2, "up": 2}, {"up": 2, "up.0": 2}], ids=str)
def test_a_submodule_of_which_nothing_is_left_whole_is_named(slices: Any) -> None:
    torch.manual_seed(0)
    why = f"slices has {list(slices)[1]!r}, which has no ops left that can run in parts; leave it out, or give"
    with pytest.raises(ValueError, match=why):
        mixed(memgraph.compile(Mixers(), ROOM, slices=slices))
