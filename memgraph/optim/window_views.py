"""A chunk of a parameter as the optimizer sees it: cut from what lies anywhere, and put back when it is updated.

w[0:262144], its gradient, its states     ->   tensors in the room of a window, or views of what is in memory
the same, updated                         ->   what has to be written to disk; all else is where it belongs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from ..storage.mapped_storage import BufferSlice
from ..storage.transfer import slice_of
from .update_operands import ParameterUpdate, UpdateOperand, new_operand
from .window_plan import WindowChunk, range_boxes

WriteBack = tuple[BufferSlice, Tensor]


@dataclass(frozen=True)
class WindowView:
    """The tensors of a chunk by the names of the operands, and its state."""

    update: ParameterUpdate
    chunk: WindowChunk
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def gather(self) -> None:
        """Bring what is moved row by row into the window."""
        for operand, tensor in self._scattered():
            for box, run in _boxes(operand, self.chunk, tensor):
                run.copy_(box)

    def write_back(self, gradient: bool) -> list[WriteBack]:
        """What of an update has to be written to disk, the gradient as well if that was changed; what is moved row by
        row is put back into memory."""
        for operand, tensor in self._scattered():
            if operand.written or gradient:
                for box, run in _boxes(operand, self.chunk, tensor):
                    box.copy_(run)
        operands = [(name, operand) for name, operand in self.update.operands.items() if operand.written or gradient]
        whole = self.chunk.whole
        return [
            (range_of(place, self.chunk, operand.tensor.dtype), self.tensors[name])
            for name, operand in operands
            if (place := operand.copied_slice(whole))
        ]

    def store_new_states(self, state: Mapping[str, Any]) -> list[WriteBack]:
        """Keep the states that an update has made; what has to be written to disk is returned."""
        update, chunk, writes = self.update, self.chunk, list[WriteBack]()
        update.keys = tuple(state)
        for key, value in state.items():
            if key in self.tensors:
                continue
            if key not in update.missing or not isinstance(value, Tensor):
                update.scalars[key] = value
                continue
            fresh = update.new_states.setdefault(key, new_operand(value))
            if fresh.slice is not None and (not chunk.whole or fresh.tensor.stride() == value.stride()):
                writes.append((range_of(fresh.slice, chunk, value.dtype), value))
            elif fresh.tensor is not value:
                view(fresh, chunk).copy_(value)
        return writes

    def _scattered(self) -> list[tuple[UpdateOperand, Tensor]]:
        """What is moved row by row, because its order is not the parameter's."""
        whole, operands = self.chunk.whole, self.update.operands.items()
        return [
            (one, self.tensors[name])
            for name, one in operands
            if one.needs_buffer(whole) and not one.copied_slice(whole)
        ]


def in_buffer(room: Tensor, operand: UpdateOperand, chunk: WindowChunk) -> Tensor:
    """Room in a window as the chunk's tensor, which counts its own versions and not all that the window sees."""
    tensor = operand.tensor
    run = room[: chunk.count * tensor.dtype.itemsize].view(tensor.dtype)
    return (run.as_strided(tensor.shape, tensor.stride()) if chunk.whole else run).data


def view(operand: UpdateOperand, chunk: WindowChunk) -> Tensor:
    """The chunk's elements where they are."""
    if chunk.whole:
        return operand.tensor.detach()
    assert operand.flat is not None
    return operand.flat[chunk.begin : chunk.end]


def range_of(place: BufferSlice, chunk: WindowChunk, dtype: torch.dtype) -> BufferSlice:
    """Where a chunk's elements lie in a place."""
    return slice_of(place, chunk.begin * dtype.itemsize, chunk.count * dtype.itemsize)


def state_of(update: ParameterUpdate, chunk: WindowChunk, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a chunk. What is one for all elements is handed to each chunk as it was before the update."""
    if chunk.whole:
        return {key: tensors.get(key, value) for key, value in update.state.items()}
    known = {key: value for key, value in update.state.items() if key in update.entries}
    scalars = {key: value.clone() for key, value in known.items() if key not in tensors and isinstance(value, Tensor)}
    return known | scalars | {key: tensors[key] for key in known if key in tensors}


def commit(optimizer: optim.Optimizer, update: ParameterUpdate) -> None:
    """All chunks of the parameter are updated: let the optimizer have its state."""
    for operand in update.operands.values():
        apart = operand.slice is not None or operand.owner is not None
        if operand.written and apart and not operand.public_tensor.is_inference():
            torch.autograd.graph.increment_version(operand.public_tensor)
    if not update.keys:
        return
    state = optimizer.state[update.parameter]
    fresh = {key: operand.public_tensor for key, operand in update.new_states.items()}
    for key in update.keys:
        value, before = {**update.scalars, **fresh}.get(key), state.get(key)
        if key in fresh or (key in update.scalars and not isinstance(before, Tensor)):
            if isinstance(value, Tensor) and key in update.scalar_devices:
                value = value.to(update.scalar_devices[key])
            state[key] = value
        elif key in update.scalars and value is not before:
            before.copy_(update.scalars[key])


def _boxes(operand: UpdateOperand, chunk: WindowChunk, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a operand in the parameter's order, each with its part of the chunk's memory."""
    begin = 0
    for box in range_boxes(operand.ordered, chunk.begin, chunk.end):
        yield box, memory[begin : begin + box.numel()].view(box.shape)
        begin += box.numel()
