"""View a chunk of a parameter as the optimizer needs it, and write it back when it is updated.

w[0:262144], its gradient, its states     ->   tensors in the buffer of a window, or views of what is in memory
the same, updated                         ->   what has to be copied to the tier; the rest is in its place
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..storage.mapped_storage import BufferSlice
from ..storage.transfer import slice_of
from .update_operands import GRADIENT, ParameterUpdate, UpdateOperand
from .window_plan import WindowChunk, range_boxes

WriteBack = tuple[BufferSlice, Tensor]


@dataclass(frozen=True)
class WindowView:
    """The tensors of a chunk, by the names of the operands."""

    update: ParameterUpdate
    chunk: WindowChunk
    tensors: dict[str, Tensor]

    def take_gradient(self) -> None:
        """View the gradient where it is: it may have come since the window was filled."""
        operand = self.update.operands[GRADIENT]
        if not operand.needs_buffer(self.chunk.whole):
            self.tensors[GRADIENT] = view(operand, self.chunk)

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
    def is_last(self) -> bool:
        """True for the last part of its parameter."""
        return self.chunk.whole or self.chunk.end == self.update.parameter.numel()

    @property
    def moved(self) -> dict[str, Tensor]:
        """The tensors that are others than those which the optimizer has."""
        operands = self.update.operands
        return {n: t for n, t in self.tensors.items() if not self.chunk.whole or operands[n].is_moved}

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


def note_writes(update: ParameterUpdate) -> None:
    """Let autograd know that the user's tensors were written, where copies of them were."""
    for operand in update.operands.values():
        if operand.written and operand.is_moved and not operand.public_tensor.is_inference():
            torch.autograd.graph.increment_version(operand.public_tensor)


def _boxes(operand: UpdateOperand, chunk: WindowChunk, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Boxes of an operand in the parameter's order, each with its range of the chunk's memory."""
    begin = 0
    for box in range_boxes(operand.ordered, chunk.begin, chunk.end):
        yield box, memory[begin : begin + box.numel()].view(box.shape)
        begin += box.numel()
