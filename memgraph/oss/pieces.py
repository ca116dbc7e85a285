"""This rank's pieces of the parameters: views of their own storage.

    w f32[7] in bucket 0, rank 1 of 2   ->   w[4:7], a flat view; written by the update, it is w that is written

Elements are taken in the order in which they lie in memory, so that a piece of a channels_last weight is contiguous,
too. Each step looks whether a parameter is still where it was: whoever assigns `p.data` moves it, and the views with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from passes.shards import Bucket, Piece

from ..errors import ShardError

Mark = tuple[object, ...]


def is_dense(tensor: Tensor) -> bool:
    """Whether each place in its memory, from the first to the last, is one of its elements."""
    return tensor.layout == torch.strided and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory, not copied; those of another one by one, copied."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.reshape(-1)


def in_order_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The elements of a tensor of the parameter's shape, flat and in the order of the parameter's."""
    if not is_dense(parameter) or _order(tensor) == _order(parameter):
        return flat(tensor) if is_dense(parameter) else tensor.detach().reshape(-1)
    return flat(torch.empty_like(parameter).copy_(tensor.detach()))


class Pieces:
    """The views of one rank, of the parameters as they lie now."""

    def __init__(self, parameters: Sequence[Tensor], buckets: Sequence[Bucket], rank: int) -> None:
        self.parameters, self.rank = list(parameters), rank
        self.buckets: list[Bucket] = []
        self.own: list[list[tuple[Piece, Tensor]]] = []  # of each bucket
        self.marks: list[Mark] = []
        self.add((), buckets)

    def add(self, parameters: Sequence[Tensor], buckets: Sequence[Bucket]) -> None:
        """More parameters, and buckets of them."""
        self.parameters += parameters
        self.buckets += buckets
        self.own += [[(piece, self.view(piece)) for piece in bucket.of(self.rank)] for bucket in buckets]
        self.marks = [_mark(parameter) for parameter in self.parameters]

    def view(self, piece: Piece) -> Tensor:
        """A piece of its parameter; the parameter in its own shape, if it is all of it and need not be cut."""
        parameter = self.parameters[piece.item]
        whole = piece.begin == 0 and piece.end == parameter.numel()
        return parameter.detach() if whole else flat(parameter)[piece.begin : piece.end]

    def moved(self) -> list[int]:
        """The parameters that lie elsewhere than when they were last looked at.

        Raises:
            ShardError: one has become another in shape, type, strides or device.
        """
        found = []
        for i, (parameter, mark) in enumerate(zip(self.parameters, self.marks, strict=True)):
            now = _mark(parameter)
            if now[1:] != mark[1:]:
                raise ShardError(f"parameter {i} was {_words(mark)} and is {_words(now)} now; make the optimizer anew")
            if now != mark:
                found.append(i)
        return found


def _order(tensor: Tensor) -> Mark:
    """What the order of its elements in memory depends on."""
    if not is_dense(tensor):
        return ("gaps", tensor.stride())
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def _mark(parameter: Tensor) -> Mark:
    return parameter.data_ptr(), tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device


def _words(mark: Mark) -> str:
    _, shape, strides, dtype, device = mark
    return f"{dtype}{list(shape)} with strides {strides} on {device}"  # type: ignore[call-overload]
