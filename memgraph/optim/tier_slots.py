"""List the slots of the tier that a rewritten graph uses, and bind those that hold state of the module.

offload(a, 0), reload(..., 0)      ->   slot 0: 4194304 bytes of this step's own
reload(w, 1)                       ->   slot 1: the slice of parameter fc.weight
offload(g, 2), return ticket       ->   slot 2: the slice of its gradient
reload(w__rows_2, 3)               ->   slot 3: some rows of the slice of a parameter
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from passes.slices.row_blocks import Rows

from ..graph.captured import Captured
from ..graph.nodes import returned_values, tensors
from ..graph.summarize import OFFLOADED, TIER
from ..storage.mapped_storage import BufferSlice, buffer_slice_of
from ..storage.places import note_tiers
from ..tensors.layout import alias_storage_as
from ..tensors.state_leaves import is_movable, state_leaves
from .offloaded_update import OffloadedStates
from .placement import GRADIENT, PARAMETER, Key, StatePlacement

OFFLOAD, RELOAD = torch.ops.memgraph.offload.default, torch.ops.memgraph.reload.default


@dataclass(frozen=True, eq=False)
class TierSlot:
    """A slot: a fake tensor for its layout, and the key of the state that it holds, if any, or `rows` of it."""

    fake: Tensor
    key: Key | None = None
    is_offloaded: bool = False  # by the graph, which else only reloads it
    rows: Rows | None = None
    tier: str = ""  # if it is not the nearest

    def slice_of(self, whole: BufferSlice) -> BufferSlice:
        """Return the slice of this slot, given that of the state."""
        if self.rows is None:
            return whole
        return whole.part(self.rows[0] * (self.fake.nbytes // self.fake.shape[0]), self.fake.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes that the step itself needs in the tier."""
        return 0 if self.key else self.fake.nbytes


def tier_slots(graph: fx.Graph, captured: Captured) -> tuple[TierSlot, ...]:
    """Return all slots of a graph, by number."""
    inputs = dict(zip(graph.find_nodes(op="placeholder"), _input_keys(captured), strict=False))
    outputs = dict(zip(returned_values(graph), captured.graph_outputs, strict=True))
    slots: dict[int, TierSlot] = {}
    for node in graph.nodes:
        if node.target is OFFLOAD:
            role = outputs.get(node)
            key, rows = ((GRADIENT, role.name), role.rows) if role is not None else (None, None)
            tier = node.meta.get(TIER, "")
            slots[node.args[1]] = TierSlot(tensors(node.args[0])[0], key, is_offloaded=True, rows=rows, tier=tier)
        elif node.target is RELOAD and node.args[0] in inputs:
            key, rows = inputs[node.args[0]]
            slots[node.args[1]] = TierSlot(
                tensors(node.args[0])[0], key, rows=rows, tier=node.args[0].meta.get(TIER, "")
            )
    return tuple(slots[number] for number in range(len(slots)))


def unread_parameters(graph: fx.Graph, captured: Captured) -> dict[Key, TierSlot]:
    """Return the offloaded parameters that no op reloads, because the step does not use them."""
    inputs = zip(graph.find_nodes(op="placeholder"), _input_keys(captured), strict=False)
    reloaded = {node.args[0] for node in graph.nodes if node.target is RELOAD}
    return {
        key: TierSlot(tensors(node)[0], key, tier=node.meta[TIER])
        for node, (key, rows) in inputs
        if OFFLOADED in node.meta and node not in reloaded and key[0] == PARAMETER and rows is None
    }


def block_layouts(captured: Captured) -> dict[str, Tensor]:
    """Return the parameters that a step reads in blocks, as meta tensors."""
    placeholders = captured.graph.graph.find_nodes(op="placeholder")
    parts = {role.name: tensors(node)[0] for node, role in zip(placeholders, captured.graph_inputs, strict=True)}
    return {
        name: torch.empty(blocks[-1][1], *parts[name].shape[1:], dtype=parts[name].dtype, device="meta")
        for name, blocks in captured.blocks.items()
    }


def _input_keys(captured: Captured) -> list[tuple[Key, Rows | None]]:
    """The key and rows of each placeholder, as if all were parameters; those of gradients to add to come last."""
    parameters = [((PARAMETER, role.name), role.rows) for role in captured.graph_inputs]
    gradients = (role for role in captured.graph_outputs if role.kind == "gradient")
    return [*parameters, *(((GRADIENT, role.name), role.rows) for role in gradients)]


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
        unread: Mapping[Key, TierSlot],
    ) -> None:  # fmt: skip
        self.placement, self.states, self.blocks = placement, states, step.blocks
        # The farthest counts: a gradient has a slot to be added to, and one when it is complete; a weight one a block.
        kept = sorted((*slots, *unread.values()), key=lambda slot: bool(slot.tier))
        self.tiers = {slot.key: slot.tier for slot in kept if slot.key}
        self.placed: PlacementKey | None = None
        self.slots = {number: (slot.key, slot) for number, slot in enumerate(slots) if slot.key}
        roles = [role for role in step.outputs if role.kind not in ("output", "shard")]
        layouts = block_layouts(step)
        self.fakes = {key: slot.fake if slot.rows is None else layouts[key[1]] for key, slot in self.slots.values()}
        # A gradient in blocks is on the tier whatever a plan says of them: no memory of the device could join them.
        joined = {role.name: layouts[role.name] for role in roles if role.kind == "gradient" and role.name in layouts}
        self.fakes |= {(GRADIENT, name): layout for name, layout in joined.items()}
        self.fakes |= {key: slot.fake for key, slot in unread.items()}
        inputs: list[Key] = [(role.kind, role.name) for role in step.inputs if role.kind != "tangent"]
        self.inputs = [inputs.index(key) for key in self.fakes if key[0] == PARAMETER]
        offloaded = {(key[1], slot.rows): number for number, (key, slot) in self.slots.items() if slot.is_offloaded}
        self.offloaded = offloaded  # name and rows of a gradient -> slot
        names = {name for name, _ in offloaded} | joined.keys()
        self.results = [role.name if role.kind == "gradient" else "" for role in roles]
        self.gradients = {position: name for position, name in enumerate(self.results) if name in names}

    def place(self, tensors: Sequence[Tensor], saved: Iterable[Tensor] = ()) -> dict[int, BufferSlice]:
        """Offload what is not in the tier yet, and return the slice of each slot.

        Args:
            tensors: the step's inputs.
            saved: tensors of runs that are open.
        """
        placed = self.placed
        is_active = self.states.is_active and self.placement.weight_files.are_whole
        if placed is None or not is_active or placed.addresses != self._addresses(tensors):
            placed = self.placed = None  # so that the disk frees old slices before it is asked for more
            placed = self.placed = self._place(tensors, saved)
        return placed.slices

    def release_to(self, other: OffloadedSlots | None) -> None:
        """Move to the device what a plan that replaces this one does not offload."""
        dropped = self.fakes.keys() - (other.fakes.keys() if other is not None else set())
        states = self.states.deactivate(other.states.owners if other is not None else ())
        self.placement.move_to_device((name for kind, name in dropped if kind == PARAMETER), states)

    def offload_gradients(self, grad_sinks: Sequence[Tensor | None]) -> None:
        """Offload the gradients that exist, as the forecast has it; earlier calls may have left them on the device."""
        for position, name in self.gradients.items():
            sink = grad_sinks[position]
            if sink is not None and sink.grad is not None:
                self.placement.adopt_gradient(name, sink.grad)

    def begin_backward(
        self, grad_sinks: Sequence[Tensor | None], adds: bool
    ) -> tuple[dict[int, Tensor], dict[int, BufferSlice]]:
        """Prepare slices for the gradients that are offloaded.

        Gradients that were set since forward began are offloaded first. A new one gets a separate buffer if backward
        does not add to the existing one, or the user still references the slice. Returns those buffers, by position,
        and all slices.

        Raises:
            SpillError: the disk has no space for them.
        """
        self.offload_gradients(grad_sinks)
        fakes: dict[str, Tensor] = {}
        for position, name in self.gradients.items():
            sink = grad_sinks[position]
            gradient = sink.grad if sink is not None else None
            if sink is None or (self.placement.is_referenced(name) if gradient is None else not adds):
                fakes[name] = self.fakes[GRADIENT, name]
        new = self.placement.new_buffers(fakes) if fakes else {}
        gradients = self.placement.gradients | new
        slices = {name: buffer_slice_of(gradients[name]) for kind, name in self.fakes if kind == GRADIENT}
        of_slots = {
            number: slot.slice_of(whole)
            for number, ((kind, name), slot) in self.slots.items()
            if kind == GRADIENT and (whole := slices[name])
        }
        return {position: new[name] for position, name in self.gradients.items() if name in new}, of_slots

    def finish_backward(
        self, gradients: Sequence[Tensor], grad_sinks: Sequence[Tensor | None], separate: Mapping[int, Tensor],
        sent: Mapping[int, Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """Return the gradients, with mapped tensors in place of blocks, and of the tickets of offloaded ones."""
        results = self._joined(gradients, separate, sent)
        for position, name in self.gradients.items():
            sink, result = grad_sinks[position], results[position]
            if sink is not None and sink.grad is not None:
                if position in separate:  # another step ran backward since this one's forward
                    sink.grad.add_(result)
                results[position] = sink.grad
            elif sink is not None:
                if position in separate:
                    self.placement.gradients[name] = separate[position]
                sink.grad = result
        return results

    def _joined(
        self, gradients: Sequence[Tensor], separate: Mapping[int, Tensor], sent: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """Return one gradient for each result, given those of the graph."""
        left, results = iter(gradients), list[Tensor]()
        for position, name in enumerate(self.results):
            parts = {rows: next(left) for rows in self.blocks.get(name, (None,))}
            if position not in self.gradients:
                results += parts.values()
                continue
            whole = separate.get(position, self.placement.gradients[name])
            # A tensor of its own: a reference to the buffer's would not be seen as the user's.
            layout = whole if name in self.blocks else sent[self.offloaded[name, None]]
            whole = alias_storage_as(whole, layout)
            for rows, part in parts.items():
                if rows is not None and (name, rows) not in self.offloaded:
                    _fill(whole[slice(*rows)], part)
            results.append(whole)
        return results

    def _place(self, tensors: Sequence[Tensor], saved: Iterable[Tensor]) -> PlacementKey:
        note_tiers(self.placement.location, self.tiers)
        slices = self.placement.place(self.fakes, self.states.activate(), saved)
        by_slot = {number: slot.slice_of(slices[key]) for number, (key, slot) in self.slots.items()}
        return PlacementKey(self._addresses(tensors), by_slot, list(map(buffer_slice_of, self._states())))

    def _addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        gradients = [self.placement.gradients[name] for kind, name in self.fakes if kind == GRADIENT]
        offloaded = (*(tensors[i] for i in self.inputs), *gradients, *self._states())
        return [os.getpid(), *(tensor.data_ptr() for tensor in offloaded)]

    def _states(self) -> list[Tensor]:
        return [leaf.tensor for _, state in self.states.states() for leaf in state_leaves(state) if is_movable(leaf)]


def _fill(rows: Tensor, part: Tensor) -> None:
    """Copy a block that is on the device, unless backward has added to these very rows."""
    if rows.data_ptr() != part.data_ptr():
        rows.copy_(part)
