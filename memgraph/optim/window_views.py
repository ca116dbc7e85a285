"""A piece of a parameter as the optimizer sees it: cut from what lies anywhere, and put back when it is updated.

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
from .window_plan import WindowPiece, aligned_boxes

WriteBack = tuple[BufferSlice, Tensor]


@dataclass(frozen=True)
class WindowView:
    """The tensors of a piece by the names of the strands, and its state."""

    subject: ParameterUpdate
    piece: WindowPiece
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def gather(self) -> None:
        """Bring what is moved row by row into the window."""
        for strand, tensor in self._scattered():
            for box, run in _boxes(strand, self.piece, tensor):
                run.copy_(box)

    def changed(self, gradient: bool) -> list[WriteBack]:
        """What of an update has to be written to disk, the gradient as well if that was changed; what is moved row by
        row is put back into memory."""
        for strand, tensor in self._scattered():
            if strand.written or gradient:
                for box, run in _boxes(strand, self.piece, tensor):
                    box.copy_(run)
        strands = [(name, strand) for name, strand in self.subject.strands.items() if strand.written or gradient]
        whole = self.piece.whole
        return [
            (range_of(place, self.piece, strand.tensor.dtype), self.tensors[name])
            for name, strand in strands
            if (place := strand.source(whole))
        ]

    def made(self, state: Mapping[str, Any]) -> list[WriteBack]:
        """Keep the states that an update has made; what has to be written to disk is returned."""
        subject, piece, writes = self.subject, self.piece, list[WriteBack]()
        subject.keys = tuple(state)
        for key, value in state.items():
            if key in self.tensors:
                continue
            if key not in subject.missing or not isinstance(value, Tensor):
                subject.scalars[key] = value
                continue
            fresh = subject.fresh.setdefault(key, new_operand(value))
            if fresh.place is not None and (not piece.whole or fresh.tensor.stride() == value.stride()):
                writes.append((range_of(fresh.place, piece, value.dtype), value))
            elif fresh.tensor is not value:
                view(fresh, piece).copy_(value)
        return writes

    def _scattered(self) -> list[tuple[UpdateOperand, Tensor]]:
        """What is moved row by row, because its order is not the parameter's."""
        whole, strands = self.piece.whole, self.subject.strands.items()
        return [(one, self.tensors[name]) for name, one in strands if one.roomy(whole) and not one.source(whole)]


def in_buffer(room: Tensor, strand: UpdateOperand, piece: WindowPiece) -> Tensor:
    """Room in a window as the piece's tensor, which counts its own versions and not all that the window sees."""
    tensor = strand.tensor
    run = room[: piece.count * tensor.dtype.itemsize].view(tensor.dtype)
    return (run.as_strided(tensor.shape, tensor.stride()) if piece.whole else run).data


def view(strand: UpdateOperand, piece: WindowPiece) -> Tensor:
    """The piece's elements where they are."""
    if piece.whole:
        return strand.tensor.detach()
    assert strand.flat is not None
    return strand.flat[piece.begin : piece.end]


def range_of(place: BufferSlice, piece: WindowPiece, dtype: torch.dtype) -> BufferSlice:
    """Where a piece's elements lie in a place."""
    return slice_of(place, piece.begin * dtype.itemsize, piece.count * dtype.itemsize)


def state_of(subject: ParameterUpdate, piece: WindowPiece, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a piece. What is one for all elements is handed to each piece as it was before the update."""
    if piece.whole:
        return {key: tensors.get(key, value) for key, value in subject.state.items()}
    known = {key: value for key, value in subject.state.items() if key in subject.entries}
    scalars = {key: value.clone() for key, value in known.items() if key not in tensors and isinstance(value, Tensor)}
    return known | scalars | {key: tensors[key] for key in known if key in tensors}


def commit(optimizer: optim.Optimizer, subject: ParameterUpdate) -> None:
    """All pieces of the parameter are updated: let the optimizer have its state."""
    for strand in subject.strands.values():
        apart = strand.place is not None or strand.owner is not None
        if strand.written and apart and not strand.known.is_inference():
            torch.autograd.graph.increment_version(strand.known)
    if not subject.keys:
        return
    state = optimizer.state[subject.parameter]
    fresh = {key: strand.known for key, strand in subject.fresh.items()}
    for key in subject.keys:
        value, before = {**subject.scalars, **fresh}.get(key), state.get(key)
        if key in fresh or (key in subject.scalars and not isinstance(before, Tensor)):
            if isinstance(value, Tensor) and key in subject.numbers:
                value = value.to(subject.numbers[key])
            state[key] = value
        elif key in subject.scalars and value is not before:
            before.copy_(subject.scalars[key])


def _boxes(strand: UpdateOperand, piece: WindowPiece, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a strand in the parameter's order, each with its part of the piece's memory."""
    begin = 0
    for box in aligned_boxes(strand.ordered, piece.begin, piece.end):
        yield box, memory[begin : begin + box.numel()].view(box.shape)
        begin += box.numel()
