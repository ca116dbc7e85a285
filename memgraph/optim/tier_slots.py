"""The slots of the far tier that a rewritten graph uses, and whose home a slot is.

offload(a, 0), reload(..., 0)      ->   slot 0: 4194304 bytes of this step's own
reload(w, 1)                       ->   slot 1: where parameter fc.weight lives
offload(g, 2), return ticket       ->   slot 2: where its gradient lives
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..graph.captured import Captured
from ..graph.nodes import returned_values, tensors
from ..graph.summarize import OFFLOADED
from ..storage.mapped_storage import BufferSlice, buffer_slice_of
from ..tensors.layout import alias_storage_as
from .offloaded_update import OffloadedStates
from .placement import GRADIENT, PARAMETER, Key, StatePlacement, state_tensors

OFFLOAD, RELOAD = torch.ops.memgraph.offload.default, torch.ops.memgraph.reload.default


@dataclass(frozen=True, eq=False)
class TierSlot:
    """What lies in a slot: a fake tensor; and whose home it is, if it is one."""

    like: Tensor
    home: Key | None = None
    is_sent: bool = False  # and not only fetched

    @property
    def nbytes(self) -> int:
        """Bytes of the step's own room."""
        return 0 if self.home else self.like.nbytes


def tier_slots(graph: fx.Graph, captured: Captured) -> tuple[TierSlot, ...]:
    """All of them, by number."""
    inputs = dict(zip(graph.find_nodes(op="placeholder"), _inputs(captured), strict=False))
    handed = {node: role.name for node, role in zip(returned_values(graph), captured.outputs, strict=True)}
    found: dict[int, TierSlot] = {}
    for node in graph.nodes:
        if node.target is OFFLOAD:
            home = (GRADIENT, handed[node]) if node in handed else None
            found[node.args[1]] = TierSlot(tensors(node.args[0])[0], home, is_sent=True)
        elif node.target is RELOAD and node.args[0] in inputs:
            found[node.args[1]] = TierSlot(tensors(node.args[0])[0], inputs[node.args[0]])
    return tuple(found[number] for number in range(len(found)))


def unread_parameters(graph: fx.Graph, captured: Captured) -> dict[Key, Tensor]:
    """The parameters that live far and that no op fetches, since the step has no use for them; with fake tensors."""
    inputs = zip(graph.find_nodes(op="placeholder"), _inputs(captured), strict=False)
    fetched = {node.args[0] for node in graph.nodes if node.target is RELOAD}
    return {
        key: tensors(node)[0]
        for node, key in inputs
        if OFFLOADED in node.meta and node not in fetched and key[0] == PARAMETER
    }


def _inputs(captured: Captured) -> list[Key]:
    """Of each placeholder what it is of, if it is a parameter, as is all that is fetched; those of gradients to add to
    stand behind the captured ones."""
    given = [(PARAMETER, role.name) for role in captured.inputs]
    return [*given, *((GRADIENT, role.name) for role in captured.outputs if role.kind == "gradient")]


@dataclass(frozen=True, eq=False)
class PlacementKey:
    """The process, and the addresses of all that belongs far, once it is there; while they are the same, so is
    everything."""

    whereabouts: list[int]
    places: dict[int, BufferSlice]  # of the slots
    others: list[BufferSlice | None]  # of states: as long as a place is held, nothing else gets its address


class OffloadedSlots:
    """The slots of a step that are homes of the module's state, and what happens there before and after a flight."""

    def __init__(
        self, residence: StatePlacement, slots: Sequence[TierSlot], step: Captured, states: OffloadedStates,
        unread: Mapping[Key, Tensor],
    ) -> None:  # fmt: skip
        self.residence, self.states, self.unread = residence, states, unread
        self.known: PlacementKey | None = None
        self.homes = {number: (slot.home, slot.like) for number, slot in enumerate(slots) if slot.home}
        inputs: list[Key] = [(role.kind, role.name) for role in step.inputs if role.kind != "tangent"]
        self.inputs = [inputs.index(home) for home in self._living() if home[0] == PARAMETER]
        gradients = [role.name for role in step.outputs if role.kind != "output"]
        sent = {slot.home[1]: number for number, slot in enumerate(slots) if slot.home and slot.is_sent}
        self.sent = {gradients.index(name): number for name, number in sent.items()}

    def settled(self, tensors: Sequence[Tensor]) -> dict[int, BufferSlice]:
        """The place of each slot, once everything is where it belongs; `tensors` are the inputs of the step."""
        known = self.known
        if known is None or not self.states.begun or known.whereabouts != self._whereabouts(tensors):
            known = self.known = None  # so that the disk has the bytes of what is gone before it is asked for more
            known = self.known = self._settle(tensors)
        return known.places

    def replaced(self, other: OffloadedSlots | None) -> None:
        """Another plan takes this one's place: what it has on the device comes back there."""
        gone = self._living().keys() - (other._living().keys() if other is not None else set())
        states = self.states.end(other.states.owners if other is not None else ())
        self.residence.leave((name for kind, name in gone if kind == PARAMETER), states)

    def before(self, takers: Sequence[Tensor | None], adds: bool) -> tuple[dict[int, Tensor], dict[int, BufferSlice]]:
        """Make room for the gradients that leave.

        Those that are there are brought home. If backward does not know to add to one of them, or somebody still has
        what lies in a home, the new one lies apart. Returned are those, by position, and the places of all slots.

        Raises:
            SpillError: the disk has no room for them.
        """
        likes: dict[str, Tensor] = {}
        for position, number in self.sent.items():
            (_, name), like = self.homes[number]
            taker = takers[position]
            there = taker.grad if taker is not None else None
            if there is not None:
                self.residence.adopt(name, there)
            if taker is None or (self.residence.is_held(name) if there is None else not adds):
                likes[name] = like
        made = self.residence.apart(likes) if likes else {}
        lie = self.residence.gradients | made
        places = {
            number: buffer_slice_of(lie[name]) for number, ((kind, name), _) in self.homes.items() if kind == GRADIENT
        }
        apart = {position: made[self._name(position)] for position in self.sent if self._name(position) in made}
        return apart, {number: place for number, place in places.items() if place}

    def after(
        self,
        gradients: Sequence[Tensor],
        takers: Sequence[Tensor | None],
        apart: Mapping[int, Tensor],
        sent: Mapping[int, Tensor],
    ) -> list[Tensor]:
        """The gradients with those that have gone home in place of their tickets."""
        found = list(gradients)
        for position, number in self.sent.items():
            name, taker = self._name(position), takers[position]
            if taker is not None and taker.grad is not None:
                if position in apart:  # another step has been differentiated since this one's forward
                    taker.grad.add_(alias_storage_as(apart[position], sent[number]))
                found[position] = taker.grad
            else:
                if taker is not None and position in apart:
                    self.residence.gradients[name] = apart[position]
                found[position] = alias_storage_as(apart.get(position, self.residence.gradients[name]), sent[number])
                if taker is not None:
                    taker.grad = found[position]
        return found

    def _settle(self, tensors: Sequence[Tensor]) -> PlacementKey:
        places = self.residence.settle(self._living(), self.states.begin())
        by_number = {number: places[home] for number, (home, _) in self.homes.items()}
        return PlacementKey(self._whereabouts(tensors), by_number, list(map(buffer_slice_of, self._states())))

    def _living(self) -> dict[Key, Tensor]:
        """All parameters and gradients that live far, and what they look like."""
        return dict(self.homes.values()) | dict(self.unread)

    def _whereabouts(self, tensors: Sequence[Tensor]) -> list[int]:
        gradients = [self.residence.gradients[name] for (kind, name), _ in self.homes.values() if kind == GRADIENT]
        far = (*(tensors[i] for i in self.inputs), *gradients, *self._states())
        return [os.getpid(), *(tensor.data_ptr() for tensor in far)]

    def _states(self) -> list[Tensor]:
        return [tensor for state in self.states.there() for tensor in state_tensors(state).values()]

    def _name(self, position: int) -> str:
        return self.homes[self.sent[position]][0][1]
