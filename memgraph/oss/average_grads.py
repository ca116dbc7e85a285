"""The gradients of a sharded optimizer, averaged over the ranks, for the pieces that this one updates.

    rank 0: g f32[8] of a bucket     rank 1: g f32[8]     ->   f32[4] of their mean on each, once it is waited for

They are averaged where that is fastest, and may be there already: held since they were clipped, left by the backward of
a compiled module, or the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .comm.shared_memory import SharedMemoryComm
from .grad_presence import SPARSE
from .held_gradients import HeldGradients, VersionKey
from .shards.shard_views import BucketViews
from .sparse import average_sparse, refuse_sparse

if TYPE_CHECKING:
    from .optimizer import OSS

Gradients = Callable[[], list[Tensor]]  # waits; one for each of the own pieces of a bucket


class GradAverager:
    """The averages of one optimizer, step after step."""

    def __init__(self, optimizer: OSS) -> None:
        self.optimizer = optimizer
        self.shared_memory: SharedMemoryComm | None = None  # the ranks, if they can read each other's memory now
        self.flats: dict[int, Tensor] = {}  # gradients as they lie, while they are averaged

    def begin(self) -> None:
        """Make gradients flat that other ranks are going to read, and tell them where they are."""
        optimizer = self.optimizer
        self.shared_memory = optimizer.reachable_ranks
        self.flats.clear()
        if self.shared_memory is not None:
            if not optimizer.grads_replicated and optimizer.held is None:
                optimizer.layout.flatten(self.flats)
            self.shared_memory.open(self.flats, optimizer.layout.parameters)

    def end(self) -> None:
        """Let go of the flat gradients."""
        self.flats.clear()

    def of(self, laid: BucketViews) -> Gradients:
        """Begin to average the gradients of a bucket."""
        optimizer = self.optimizer
        if optimizer.held is not None:
            held = optimizer.held.gradients_of(laid)
            return lambda: held
        if (parts := optimizer.sharded_grads.averaged(laid)) is not None:
            return parts
        if optimizer.grads_replicated:
            own = optimizer.layout.own_gradients(laid, self.flats, optimizer.sharded_grads.kinds)
            return lambda: own
        if self.shared_memory is not None:
            near, mine = self.shared_memory, optimizer.layout.own_sources(laid, self.flats, optimizer.comm.rank)
            return lambda: laid.gradients(near.average(laid, mine))
        wait = optimizer.comm.reduce(laid.bucket, optimizer.layout.sources(laid, self.flats))
        return lambda: laid.gradients(wait())

    def hold(self, kinds: Sequence[int]) -> HeldGradients:
        """The averages of all gradients."""
        optimizer = self.optimizer
        kind = VersionKey if optimizer.grads_replicated else HeldGradients
        return kind(optimizer.layout.parameters, kinds, self._all(kinds))

    def give(self, kinds: Sequence[int]) -> None:
        """Let all own pieces have their gradients."""
        for laid, gradients in self._all(kinds):
            assign_grads(laid, gradients, kinds)

    def _all(self, kinds: Sequence[int]) -> list[tuple[BucketViews, list[Tensor]]]:
        """The averages of all buckets, for their own pieces."""
        self.begin()
        coming = [(laid, self.of(laid)) for laid in self.used(kinds)]
        found = [(laid, wait()) for laid, wait in coming]
        if self.shared_memory is not None:
            self.shared_memory.meet("averaging of the gradients")
        self.end()
        if self.optimizer.splits_parameters or self.optimizer.held is not None or SPARSE not in kinds:
            return found
        return [(laid, self._with_sparse(laid, gradients, kinds)) for laid, gradients in found]

    def _with_sparse(self, laid: BucketViews, gradients: list[Tensor], kinds: Sequence[int]) -> list[Tensor]:
        """The gradients of whole parameters, sparse where they are so."""
        exchange, parameters = self.optimizer.comm, self.optimizer.layout.parameters
        found = dict(zip((piece.item for piece, _ in laid.own), gradients, strict=True))
        for piece in laid.bucket.pieces:
            if kinds[piece.item] != SPARSE:
                continue
            parameter = parameters[piece.item]
            gradient = (
                parameter.grad if self.optimizer.grads_replicated else average_sparse(exchange, parameter, piece.rank)
            )
            if piece.rank == exchange.rank and gradient is not None:
                found[piece.item] = gradient
        return list(found.values())

    def used(self, kinds: Sequence[int]) -> list[BucketViews]:
        """The buckets in which some rank has a gradient."""
        if self.optimizer.splits_parameters and SPARSE in kinds:
            refuse_sparse(self.optimizer.optimizer_class)
        return [laid for laid in self.optimizer.layout.buckets if any(kinds[item] for item in laid.bucket.items)]


def assign_grads(laid: BucketViews, gradients: Sequence[Tensor], kinds: Sequence[int]) -> list[Tensor]:
    """Let the own pieces of a bucket have their gradients; returns those that have one."""
    given = []
    for (piece, view), gradient in zip(laid.own, gradients, strict=True):
        if kinds[piece.item]:
            view.grad = gradient
            given.append(view)
    return given
