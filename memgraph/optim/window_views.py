"""View a chunk of a parameter as the optimizer needs it, and write it back when it is updated.

w[0:262144], its gradient, its states     ->   tensors in the buffer of a window, or views of what is in memory
the same, updated                         ->   what has to be copied to the tier; the rest is in its place
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from ..storage.mapped_storage import BufferSlice, tensor_spec_of
from ..storage.transfer import slice_of
from ..tensors.state_leaves import StateLeaf
from .update_operands import ParameterUpdate, UpdateOperand, new_operand
from .window_plan import WindowChunk, range_boxes

WriteBack = tuple[BufferSlice, Tensor]


@dataclass(frozen=True)
class WindowView:
    """The tensors of a chunk, by the names of the operands, and its state."""

    update: ParameterUpdate
    chunk: WindowChunk
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def gather(self) -> None:
        """Copy operands in another order than the parameter's to the window, row by row."""
        for operand, tensor in self._gathered():
            for box, run in _boxes(operand, self.chunk, tensor):
                run.copy_(box)

    def write_back(self, gradient: bool) -> list[WriteBack]:
        """Copy gathered operands back, and return what to copy to the tier, the `gradient` only if it changed."""
        for operand, tensor in self._gathered():
            if operand.written or gradient:
                for box, run in _boxes(operand, self.chunk, tensor):
                    box.copy_(run)
        return [
            (range_of(slice, self.chunk, operand.tensor.dtype), self.tensors[name])
            for name, operand in self.update.operands.items()
            if (operand.written or gradient) and (slice := operand.copied_slice(self.chunk.whole))
        ]

    @property
    def moved(self) -> dict[str, Tensor]:
        """The tensors that are not where they are kept."""
        return {name: self.tensors[name] for name, operand in self.update.operands.items() if operand.slice is not None}

    def store_leaves(self, leaves: Iterable[StateLeaf]) -> list[WriteBack]:
        """Put the tensors of the tier back into a state, and return what has to be copied there."""
        known, writes = {**self.update.operands, **self.update.new_states}, list[WriteBack]()
        for leaf in leaves:
            operand = known.get(leaf.name)
            if operand is None or operand.slice is None or leaf.tensor is operand.tensor:
                continue
            if tensor_spec_of(leaf.tensor) == tensor_spec_of(operand.tensor):
                writes.append((operand.slice, leaf.tensor))
                leaf.put(operand.tensor)
        return writes

    def store_new_states(self, state: Mapping[str, Any]) -> list[WriteBack]:
        """Keep the states that the step has created, and return what has to be copied to the tier."""
        update, chunk, writes = self.update, self.chunk, list[WriteBack]()
        update.keys = tuple(state)
        for key, value in state.items():
            if key in self.tensors:
                continue
            if key not in update.missing_states or not isinstance(value, Tensor):
                update.scalars[key] = value
                continue
            created = update.new_states.setdefault(key, new_operand(value))
            if created.slice is not None and (not chunk.whole or created.tensor.stride() == value.stride()):
                writes.append((range_of(created.slice, chunk, value.dtype), value))
            elif created.tensor is not value:
                view(created, chunk).copy_(value)
        return writes

    def _gathered(self) -> list[tuple[UpdateOperand, Tensor]]:
        whole, operands = self.chunk.whole, self.update.operands.items()
        return [
            (operand, self.tensors[name])
            for name, operand in operands
            if operand.needs_buffer(whole) and not operand.copied_slice(whole)
        ]


def in_buffer(buffer: Tensor, operand: UpdateOperand, chunk: WindowChunk) -> Tensor:
    """View bytes of a window as the chunk's tensor, which has a version counter of its own."""
    tensor = operand.tensor
    run = buffer[: operand.chunk_nbytes(chunk)].view(tensor.dtype)
    return (run.as_strided(tensor.shape, tensor.stride()) if chunk.whole else run).data


def view(operand: UpdateOperand, chunk: WindowChunk) -> Tensor:
    """View the chunk's elements where they are."""
    if chunk.whole:
        return operand.tensor.detach()
    assert operand.flat is not None
    return operand.flat[chunk.begin : chunk.end]


def range_of(slice: BufferSlice, chunk: WindowChunk, dtype: torch.dtype) -> BufferSlice:
    """Return the chunk's elements within the slice of a whole tensor."""
    return slice if chunk.whole else slice_of(slice, chunk.begin * dtype.itemsize, chunk.count * dtype.itemsize)


def state_of(update: ParameterUpdate, chunk: WindowChunk, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of a chunk. Every chunk gets the scalars as they were before the update."""
    if chunk.whole:
        return {key: tensors.get(key, value) for key, value in update.state.items()}
    state = {key: value for key, value in update.state.items() if key in update.state_dtypes}
    scalars = {key: value.clone() for key, value in state.items() if key not in tensors and isinstance(value, Tensor)}
    return state | scalars | {key: tensors[key] for key in state if key in tensors}


def commit(optimizer: optim.Optimizer, update: ParameterUpdate) -> None:
    """Give the optimizer the new state of a parameter whose chunks are all updated."""
    for operand in update.operands.values():
        copied = operand.slice is not None or operand.owner is not None
        if operand.written and copied and not operand.public_tensor.is_inference():
            torch.autograd.graph.increment_version(operand.public_tensor)
    if not update.keys:
        return
    state = optimizer.state[update.parameter]
    created = {key: operand.public_tensor for key, operand in update.new_states.items()}
    for key in update.keys:
        value, before = {**update.scalars, **created}.get(key), state.get(key)
        if key in created or (key in update.scalars and not isinstance(before, Tensor)):
            if isinstance(value, Tensor) and key in update.scalar_devices:
                value = value.to(update.scalar_devices[key])
            state[key] = value
        elif key in update.scalars and value is not before:
            before.copy_(update.scalars[key])


def _boxes(operand: UpdateOperand, chunk: WindowChunk, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Boxes of an operand in the parameter's order, each with its range of the chunk's memory."""
    begin = 0
    for box in range_boxes(operand.ordered, chunk.begin, chunk.end):
        yield box, memory[begin : begin + box.numel()].view(box.shape)
        begin += box.numel()
