"""List the slots of the tier that a rewritten graph uses, and bind those that hold state of the module.

offload(a, 0), reload(..., 0)      ->   slot 0: 4194304 bytes of this step's own
reload(w, 1)                       ->   slot 1: the slice of parameter fc.weight
offload(g, 2), return ticket       ->   slot 2: the slice of its gradient
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
from .placement import GRADIENT, PARAMETER, Key, StatePlacement, elementwise_states

OFFLOAD, RELOAD = torch.ops.memgraph.offload.default, torch.ops.memgraph.reload.default


@dataclass(frozen=True, eq=False)
class TierSlot:
    """A slot: a fake tensor for its layout, and the key of the state that it holds, if any."""

    fake: Tensor
    key: Key | None = None
    is_offloaded: bool = False  # by the graph, which else only reloads it

    @property
    def nbytes(self) -> int:
        """Bytes that the step itself needs in the tier."""
        return 0 if self.key else self.fake.nbytes


def tier_slots(graph: fx.Graph, captured: Captured) -> tuple[TierSlot, ...]:
    """Return all slots of a graph, by number."""
    inputs = dict(zip(graph.find_nodes(op="placeholder"), _input_keys(captured), strict=False))
    outputs = {node: role.name for node, role in zip(returned_values(graph), captured.outputs, strict=True)}
    slots: dict[int, TierSlot] = {}
    for node in graph.nodes:
        if node.target is OFFLOAD:
            key = (GRADIENT, outputs[node]) if node in outputs else None
            slots[node.args[1]] = TierSlot(tensors(node.args[0])[0], key, is_offloaded=True)
        elif node.target is RELOAD and node.args[0] in inputs:
            slots[node.args[1]] = TierSlot(tensors(node.args[0])[0], inputs[node.args[0]])
    return tuple(slots[number] for number in range(len(slots)))


def unread_parameters(graph: fx.Graph, captured: Captured) -> dict[Key, Tensor]:
    """Return the offloaded parameters that no op reloads, because the step does not use them, as fake tensors."""
    inputs = zip(graph.find_nodes(op="placeholder"), _input_keys(captured), strict=False)
    reloaded = {node.args[0] for node in graph.nodes if node.target is RELOAD}
    return {
        key: tensors(node)[0]
        for node, key in inputs
        if OFFLOADED in node.meta and node not in reloaded and key[0] == PARAMETER
    }


def _input_keys(captured: Captured) -> list[Key]:
    """A key for each placeholder, as if all were parameters; those of gradients to accumulate into come last."""
    parameters = [(PARAMETER, role.name) for role in captured.inputs]
    return [*parameters, *((GRADIENT, role.name) for role in captured.outputs if role.kind == "gradient")]


@dataclass(frozen=True, eq=False)
class PlacementKey:
    """The process, and the addresses of everything offloaded: while they are the same, so are the slices."""

    addresses: list[int]
    slices: dict[int, BufferSlice]  # by slot
    states: list[BufferSlice | None]  # referenced, so that nothing else gets their addresses


class OffloadedSlots:
    """The slots of a step that hold state of the module, and what happens to them before and after a run."""

    def __init__(
        self, placement: StatePlacement, slots: Sequence[TierSlot], step: Captured, states: OffloadedStates,
        unread: Mapping[Key, Tensor],
    ) -> None:  # fmt: skip
        self.placement, self.states, self.unread = placement, states, unread
        self.placed: PlacementKey | None = None
        self.slots = {number: (slot.key, slot.fake) for number, slot in enumerate(slots) if slot.key}
        inputs: list[Key] = [(role.kind, role.name) for role in step.inputs if role.kind != "tangent"]
        self.inputs = [inputs.index(key) for key in self._fakes() if key[0] == PARAMETER]
        gradients = [role.name for role in step.outputs if role.kind != "output"]
        numbers = {slot.key[1]: number for number, slot in enumerate(slots) if slot.key and slot.is_offloaded}
        self.offloaded = {gradients.index(name): number for name, number in numbers.items()}  # position -> slot

    def place(self, tensors: Sequence[Tensor]) -> dict[int, BufferSlice]:
        """Offload what is not in the tier yet, and return the slice of each slot; `tensors` are the step's inputs."""
        placed = self.placed
        if placed is None or not self.states.is_active or placed.addresses != self._addresses(tensors):
            placed = self.placed = None  # so that the disk frees old slices before it is asked for more
            placed = self.placed = self._place(tensors)
        return placed.slices

    def release_to(self, other: OffloadedSlots | None) -> None:
        """Move to the device what a plan that replaces this one does not offload."""
        dropped = self._fakes().keys() - (other._fakes().keys() if other is not None else set())
        states = self.states.deactivate(other.states.owners if other is not None else ())
        self.placement.move_to_device((name for kind, name in dropped if kind == PARAMETER), states)

    def begin_backward(
        self, grad_sinks: Sequence[Tensor | None], adds: bool
    ) -> tuple[dict[int, Tensor], dict[int, BufferSlice]]:
        """Prepare slices for the gradients that are offloaded.

        Existing gradients are offloaded first. A new one gets a separate buffer if backward does not add to the
        existing one, or the user still references the slice. Returns those buffers, by position, and all slices.

        Raises:
            SpillError: the disk has no space for them.
        """
        fakes: dict[str, Tensor] = {}
        for position, number in self.offloaded.items():
            (_, name), fake = self.slots[number]
            sink = grad_sinks[position]
            gradient = sink.grad if sink is not None else None
            if gradient is not None:
                self.placement.adopt_gradient(name, gradient)
            if sink is None or (self.placement.is_referenced(name) if gradient is None else not adds):
                fakes[name] = fake
        new = self.placement.new_buffers(fakes) if fakes else {}
        gradients = self.placement.gradients | new
        slices = {
            number: buffer_slice_of(gradients[name])
            for number, ((kind, name), _) in self.slots.items()
            if kind == GRADIENT
        }
        separate = {position: new[self._name(position)] for position in self.offloaded if self._name(position) in new}
        return separate, {number: slice for number, slice in slices.items() if slice}

    def finish_backward(
        self, gradients: Sequence[Tensor], grad_sinks: Sequence[Tensor | None], separate: Mapping[int, Tensor],
        sent: Mapping[int, Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """Return the gradients, with mapped tensors in place of the tickets of offloaded ones."""
        results = list(gradients)
        for position, number in self.offloaded.items():
            name, sink = self._name(position), grad_sinks[position]
            if sink is not None and sink.grad is not None:
                if position in separate:  # another step ran backward since this one's forward
                    sink.grad.add_(alias_storage_as(separate[position], sent[number]))
                results[position] = sink.grad
            else:
                if sink is not None and position in separate:
                    self.placement.gradients[name] = separate[position]
                results[position] = alias_storage_as(
                    separate.get(position, self.placement.gradients[name]), sent[number]
                )
                if sink is not None:
                    sink.grad = results[position]
        return results

    def _place(self, tensors: Sequence[Tensor]) -> PlacementKey:
        slices = self.placement.place(self._fakes(), self.states.activate())
        by_slot = {number: slices[key] for number, (key, _) in self.slots.items()}
        return PlacementKey(self._addresses(tensors), by_slot, list(map(buffer_slice_of, self._states())))

    def _fakes(self) -> dict[Key, Tensor]:
        """All offloaded parameters and gradients."""
        return dict(self.slots.values()) | dict(self.unread)

    def _addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        gradients = [self.placement.gradients[name] for (kind, name), _ in self.slots.values() if kind == GRADIENT]
        offloaded = (*(tensors[i] for i in self.inputs), *gradients, *self._states())
        return [os.getpid(), *(tensor.data_ptr() for tensor in offloaded)]

    def _states(self) -> list[Tensor]:
        return [tensor for state in self.states.states() for tensor in elementwise_states(state).values()]

    def _name(self, position: int) -> str:
        return self.slots[self.offloaded[position]][0][1]
