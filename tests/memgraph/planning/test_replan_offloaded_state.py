"""Offloaded state is looked up again only if it may have moved, and is reloaded when a plan is replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from memgraph.optim.placement import StatePlacement
from memgraph.optim.tier_slots import OffloadedSlots
from memgraph.storage.mapped_storage import is_offloaded
from memgraph.tensors.state_leaves import state_leaves
from tests.support.streamed_state import Twins, batch, far


def trained() -> Twins:
    """Their state is far, their plan will not be looked at again."""
    twins = Twins()
    twins.train(1)
    twins.model.__dict__["_latest"]._replan_due = False
    twins.train(2)
    assert far(twins.module, twins.ours) == {"parameter", "gradient", "state"}
    return twins


def state_slots(twins: Twins) -> OffloadedSlots:
    found = twins.model.__dict__["_latest"].parts.state_slots
    assert isinstance(found, OffloadedSlots)
    return found


def states(twins: Twins) -> list[Tensor]:
    """Return the states that the plan offloads, wherever they are."""
    parameters = state_slots(twins).states.owners
    return [leaf.tensor for parameter in parameters for leaf in state_leaves(twins.ours.state[parameter])]


def bind_anew(twins: Twins) -> None:
    for parameter in twins.module.parameters():
        parameter.data = parameter.detach().clone()


def load_states(twins: Twins) -> None:
    twins.ours.load_state_dict(copy.deepcopy(twins.ours.state_dict()))


def clear_states(twins: Twins) -> None:
    """New ones may get the addresses of the old."""
    kept = {parameter: {key: value.clone() for key, value in s.items()} for parameter, s in twins.ours.state.items()}
    twins.ours.state.clear()
    twins.ours.state.update(
        {parameter: {key: value.clone() for key, value in state.items()} for parameter, state in kept.items()}
    )


@pytest.mark.long
def test_while_nothing_moves_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = trained()
    with monkeypatch.context() as patch:
        patch.setattr(StatePlacement, "place", lambda *given: pytest.fail("looked for what has not moved"))
        twins.train(2)


@pytest.mark.long
@pytest.mark.parametrize("move", [bind_anew, load_states, clear_states])
def test_state_that_has_moved_is_offloaded_to_its_slot(move: Callable[[Twins], None]) -> None:
    twins = trained()
    move(twins)
    assert far(twins.module, twins.ours) < {"parameter", "gradient", "state"}
    twins.model(batch())
    assert far(twins.module, twins.ours) >= {"parameter", "state"}
    assert states(twins)
    assert all(map(is_offloaded, states(twins)))
    twins.train(2)


@pytest.mark.long
def test_parameters_and_states_of_a_plan_that_is_replaced_come_back() -> None:
    twins = trained()
    state_slots(twins).release_to(None)
    assert far(twins.module, twins.ours) == {"gradient"}
    twins.assert_same()
    for optimizer in (twins.theirs, twins.ours):
        optimizer.step()
        optimizer.zero_grad()
    assert far(twins.module, twins.ours) == set()
    twins.assert_same()
    twins.train(2)  # the old plan is run again, as by another thread


def test_new_states_are_made_where_the_next_plan_has_them() -> None:
    twins = trained()
    state_slots(twins).release_to(None)
    for optimizer in (twins.theirs, twins.ours):
        optimizer.state.clear()
        optimizer.step()
    assert far(twins.module, twins.ours) == {"gradient"}
    twins.assert_same()


@pytest.mark.long
def test_state_that_the_next_plan_offloads_too_stays_offloaded() -> None:
    twins = trained()
    found = state_slots(twins)
    other = copy.copy(found)
    other.states = replace(found.states, tiers=dict.fromkeys(found.states.owners[:1], ""))
    addresses = [parameter.data_ptr() for parameter in twins.module.parameters()]
    found.release_to(other)
    assert addresses == [parameter.data_ptr() for parameter in twins.module.parameters()]
    assert found.states.update.offloaded_owners == set(found.states.owners[:1])
    kept = [
        parameter
        for parameter, state in twins.ours.state.items()
        if any(is_offloaded(leaf.tensor) for leaf in state_leaves(state))
    ]
    assert [id(parameter) for parameter in kept] == [id(found.states.owners[0])]
    twins.assert_same()
