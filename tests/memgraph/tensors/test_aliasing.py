"""Parameters that lie in the memory of another tensor stay one with it, wherever the budget wants the state to live."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memgraph
from memgraph.storage.mapped_storage import is_offloaded
from memgraph.tensors.aliasing import describe_overlap
from tests.support.streamed_state import ADAMW, batch, chain, loss, streamed

TWO = (0, 4)  # of equal shape


def same_data() -> nn.Module:
    """Not one Parameter, but two over the same bytes."""
    model = chain()
    first, second = (model.get_parameter(f"{i}.weight") for i in TWO)
    second.data = first.data
    return model


def seen_by_a_buffer() -> nn.Module:
    model = chain()
    model.register_buffer("seen", model.get_parameter("0.weight").detach()[:3])
    return model


def smallest(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(model, batch(), budget=1, optimizer=optimizer, loss=loss, time_limit=0)
    return int(caught.value.smallest)


@pytest.mark.long
@pytest.mark.parametrize("make", [same_data, seen_by_a_buffer])
def test_what_shares_memory_is_trained_as_in_eager_and_shares_it_afterwards(make: Callable[[], nn.Module]) -> None:
    eager, ours = make(), make()
    theirs, optimizer = ADAMW(eager.parameters()), ADAMW(ours.parameters())
    compiled = streamed(ours, smallest(ours, optimizer), optimizer=optimizer)
    for seed in range(2):
        loss(eager(batch(seed))).backward()
        compiled(batch(seed)).backward()
        for each in (theirs, optimizer):
            each.step()
            each.zero_grad()
    expected, found = eager.state_dict(), ours.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.budget
    first = ours.get_parameter("0.weight")
    other = ours.get_buffer("seen") if make is seen_by_a_buffer else ours.get_parameter("4.weight")
    assert first.data_ptr() == other.data_ptr()


def test_what_lies_far_is_not_parted_from_what_is_bound_to_its_like() -> None:
    model = chain()
    optimizer = ADAMW(model.parameters())
    compiled = streamed(model, int(smallest(model, optimizer) * 1.05), optimizer=optimizer)
    compiled(batch()).backward()
    optimizer.zero_grad()
    first, second = (model.get_parameter(f"{i}.weight") for i in TWO)
    assert is_offloaded(first)
    first.data = second.data = second.detach().clone()
    with pytest.raises(memgraph.UpdateError, match=r"[04]\.weight and [04]\.weight share their memory"):
        compiled(batch())
    first.data = second.detach().clone()
    compiled(batch()).backward()


@pytest.mark.long
def test_what_shares_memory_is_not_updated_while_backward_reads_it() -> None:
    model = same_data()
    compiled = streamed(model, 1 << 30, optimizer=ADAMW(model.parameters()), fuse_update=True)
    with pytest.raises(memgraph.FusedError, match="share their memory"):
        compiled(batch())


def test_what_shares_memory_and_is_frozen_does_not_stand_in_the_way_of_updates() -> None:
    eager, ours = same_data(), same_data()
    for model in (eager, ours):
        for i in TWO:
            model.get_submodule(str(i)).requires_grad_(False)
    theirs, optimizer = ADAMW(eager.parameters()), ADAMW(ours.parameters())
    loss(eager(batch())).backward()
    theirs.step()
    streamed(ours, 1 << 30, optimizer=optimizer, fuse_update=True)(batch()).backward()
    optimizer.step()
    expected, found = eager.state_dict(), ours.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_only_bytes_in_common_are_shared() -> None:
    flat = torch.zeros(10)
    named = {"a": flat[:4], "b": flat[4:8], "c": flat[7:], "d": flat[:0]}
    assert (
        describe_overlap(named, ["a", "b", "c", "d"]) == "b and c share their memory: let one Parameter stand for both"
    )
    assert not describe_overlap(named, ["a", "d"])
