"""This rank's pieces of the parameters: views of their own storage.

    w f32[7] in bucket 0, rank 1 of 2   ->   w[4:7], a flat view; written by the update, it is w that is written

Elements are taken in the order in which they lie in memory, so that a piece of a channels_last weight is contiguous,
too. Each step looks whether a parameter is still where it was: who assigns `p.data` moves it, and the views with it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.shards import Bucket, Piece

from ...errors import ShardError
from ...tensors.layout import flat, is_dense
from .placeholder_grads import is_placeholder

Mark = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


@dataclass(frozen=True)
class BucketViews:
    """A bucket, with views of the parameters as they lie."""

    bucket: Bucket
    stretches: tuple[tuple[Piece, ...], ...]  # of each rank
    views: tuple[tuple[Tensor, ...], ...]  # of each of them, flat
    own: tuple[tuple[Piece, Tensor], ...]  # what the update of this rank is given

    def gradients(self, stretches: Sequence[Tensor]) -> list[Tensor]:
        """For each of the own pieces its part of the gradient of the stretches of this rank, in the piece's shape."""
        found = []
        rest = list(stretches)
        for piece, view in self.own:
            found.append(_in_shape_of(rest[0][: piece.count], view))
            rest[0] = rest[0][piece.count :]
            if not rest[0].numel():
                del rest[0]
        return found


class ShardViews:
    """The views of one rank, of the parameters as they lie now."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.parameters: list[Tensor] = []
        self.buckets: list[BucketViews] = []
        self.marks: list[Mark] = []
        self.checksum = 0  # the same on ranks whose parameters are laid out alike, and hardly ever on others

    def add(self, parameters: Sequence[Tensor], buckets: Sequence[Bucket]) -> None:
        """More parameters, and buckets of them.

        Raises:
            ShardError: some memory is that of two parameters.
        """
        _refuse_overlap([*self.parameters, *parameters])
        self.parameters += parameters
        self.buckets += map(self._lay, buckets)
        self.marks += map(_mark, parameters)
        words = [str(laid.bucket) for laid in self.buckets] + [str(mark[1:4]) for mark in self.marks]
        self.checksum = zlib.crc32("\n".join(words).encode()) >> 1

    @property
    def device(self) -> torch.device:
        """Where what ranks tell each other about all parameters comes from."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    def number(self, laid: BucketViews) -> int:
        """Which bucket it is."""
        return next(i for i, one in enumerate(self.buckets) if one is laid)

    def are_others(self) -> bool:
        """Whether a parameter has become another in shape, type, strides or device."""
        return [mark[1:] for mark in map(_mark, self.parameters)] != [mark[1:] for mark in self.marks]

    def renew(self) -> list[tuple[Tensor, Tensor]]:
        """Make the views anew, if a parameter lies elsewhere than it did; each old one with its new one.

        Raises:
            ShardError: a parameter has become another in shape, type, strides or device. Nothing has changed.
        """
        now = list(map(_mark, self.parameters))
        if now == self.marks:
            return []
        for i, (new, old) in enumerate(zip(now, self.marks, strict=True)):
            if new[1:] != old[1:]:
                raise ShardError(f"parameter {i} was {_words(old)} and is {_words(new)} now; make the optimizer anew")
        _refuse_overlap(self.parameters)
        before, self.marks = self.buckets, now
        self.buckets = [self._lay(laid.bucket) for laid in before]
        pairs = zip(before, self.buckets, strict=True)
        return [(a, b) for old, new in pairs for (_, a), (_, b) in zip(old.own, new.own, strict=True)]

    def sources(self, laid: BucketViews, flats: dict[int, Tensor]) -> list[list[Tensor]]:
        """The gradients of the stretches of a bucket, for each rank; zeros where there is none here."""
        return [self.own_sources(laid, flats, rank) for rank in range(self.ranks)]

    def flatten(self, flats: dict[int, Tensor]) -> None:
        """Put the gradients of all parameters into `flats`."""
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None and not is_placeholder(parameter.grad):
                self._source(Piece(i, 0, 0, 0, 0), flats)

    def own_sources(self, laid: BucketViews, flats: dict[int, Tensor], rank: int) -> list[Tensor]:
        """The gradients of one rank's stretches of a bucket; those that are flat by now are in `flats`."""
        return [self._source(piece, flats) for piece in laid.stretches[rank]]

    def own_gradients(self, laid: BucketViews, flats: dict[int, Tensor], kinds: Sequence[int]) -> list[Tensor]:
        """The gradients of the own pieces of a bucket, as they are here; nothing stands for one that no rank has."""
        return [
            _in_shape_of(self._source(piece, flats), view) if kinds[piece.item] else view.new_empty(0)
            for piece, view in laid.own
        ]

    def _source(self, piece: Piece, flats: dict[int, Tensor]) -> Tensor:
        parameter, known = self.parameters[piece.item], flats.get(piece.item)
        if parameter.grad is None or is_placeholder(parameter.grad):
            return parameter.detach().new_zeros(piece.count)
        if known is None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            known = flats[piece.item] = in_order_of(gradient, parameter)
        return known[piece.begin : piece.end]

    def _lay(self, bucket: Bucket) -> BucketViews:
        stretches = tuple(bucket.stretches(rank) for rank in range(self.ranks))
        views = tuple(tuple(map(self._stretch, of_rank)) for of_rank in stretches)
        return BucketViews(bucket, stretches, views, tuple((piece, self._own(piece)) for piece in bucket.of(self.rank)))

    def _stretch(self, piece: Piece) -> Tensor:
        parameter = self.parameters[piece.item].detach()
        return flat(parameter)[piece.begin : piece.end] if is_dense(parameter) else parameter

    def _own(self, piece: Piece) -> Tensor:
        """A piece in the parameter's own shape, if it is all of it: some optimizers look at that."""
        parameter = self.parameters[piece.item]
        return parameter.detach() if piece.count == parameter.numel() else self._stretch(piece)


def in_order_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The elements of a tensor of the parameter's shape, flat and in the order of the parameter's."""
    if tensor.stride() == parameter.stride() and is_dense(tensor):
        return flat(tensor)
    if not is_dense(parameter):
        return tensor.detach().reshape(-1)
    return flat(torch.empty_like(parameter).copy_(tensor.detach()))


def _in_shape_of(taken: Tensor, view: Tensor) -> Tensor:
    """Flat elements in the shape and order of what they belong to."""
    if is_dense(view):
        return taken.as_strided(view.shape, view.stride(), taken.storage_offset())
    return taken.view(view.shape)


def _refuse_overlap(parameters: Sequence[Tensor]) -> None:
    """Raise if some memory would have two owners.

    Raises:
        ShardError: two parameters lie over each other, or one over itself.
    """
    for i, parameter in enumerate(parameters):
        if torch._debug_has_internal_overlap(parameter) == 1:
            raise ShardError(f"parameter {i} of shape {tuple(parameter.shape)} lies over itself; make it contiguous")
    spans = sorted((p.data_ptr(), p.data_ptr() + _extent(p), i) for i, p in enumerate(parameters) if p.numel())
    for (_, end, i), (begin, _, k) in itertools.pairwise(spans):
        if begin < end and parameters[i].device == parameters[k].device:
            raise ShardError(
                f"parameters {i} and {k} share memory, which can't have two owners; tie them as one Parameter"
            )


def _extent(parameter: Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return (last + 1) * parameter.element_size()


def _mark(parameter: Tensor) -> Mark:
    return parameter.data_ptr(), tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device


def _words(mark: Mark) -> str:
    _, shape, strides, dtype, device = mark
    return f"{dtype}{list(shape)} with strides {strides} on {device}"
