"""The states of shards that live far, bucket by bucket, and the update of a bucket whose they are.

    bucket 3 on this rank: 3 MB of parameters, AdamW   ->   exp_avg and exp_avg_sq of them, 6 MB, in a nameless file
    step()                                                  averaged, updated in windows, gathered, as every bucket

Parameters and gradients stay on the device. Of a bucket that is far, what is too small for a trip stays there, too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from passes.ir.machine import SMALLEST_HOME

from ..optim.elementwise import is_elementwise, is_nondeterministic
from ..optim.offloaded_update import OffloadedUpdate
from ..optim.optimizer_clone import ClonedOptimizer, clone_optimizer
from ..optim.state_parts import PARTS, Owner, StatePart, is_large, partition_states
from ..optim.windowed_update import WindowedUpdate
from .shards.param_groups import Group, options

if TYPE_CHECKING:
    from .optimizer import OSS


class OffloadedShards(OffloadedUpdate):
    """The update of one optimizer's shards; the owners of states that are far are buckets, by their numbers."""

    def __init__(self, oss: OSS) -> None:
        super().__init__(oss)
        self.oss = oss
        self.half: tuple[int, WindowedUpdate] | None = None  # a bucket, and its update that the disk has interrupted

    @property
    def can_stream(self) -> bool:
        parameters, inner = self.oss.pieces.parameters, self.oss.inner
        kinds = {(group, p.dtype) for group, p in zip(self.oss.group_of, parameters, strict=True)}
        on_cpu = all(p.device.type == "cpu" for p in parameters)
        steady = not any(is_nondeterministic(inner, *kind) for kind in kinds)
        return on_cpu and self.oss.is_cut and is_elementwise(inner) and steady

    def install(self) -> None:
        """Nothing has to be put on the optimizer, which looks here."""

    def forget(self) -> None:
        """Nothing is to be finished any more."""
        self.half = None

    def states(self, owners: Collection[Owner]) -> list[dict[str, object]]:
        """The states of the large pieces of these buckets, as far as there are any."""
        laid, state = self.oss.pieces.laid, self.oss.inner.state
        own = [laid[i].own for i in owners if isinstance(i, int) and i < len(laid)]
        return [state[view] for pieces in own for _, view in pieces if is_large(view) and view in state]

    def update(self, number: int, group: Group) -> None:
        """Update the pieces of a bucket in windows; where the disk has interrupted that, go on.

        Raises:
            SpillError: the disk failed. The next call for this bucket goes on.
        """
        with torch.inference_mode(False), torch.no_grad():
            if self.half is None or self.half[0] != number:
                self.half = (
                    number,
                    WindowedUpdate(clone_optimizer(self.oss.inner, [group]), self.current, is_large, self.location),
                )
            self.half[1].run()
            self.half = None


def shard_parts(oss: OSS) -> list[StatePart]:
    """The states of the optimizer's buckets, cut into parts of about the same bytes: the most of any rank, so that it
    is the same parts on all."""
    if not oss.far.can_stream:
        return []
    return partition_states([(i, max(of_ranks)) for i, of_ranks in enumerate(large_nbytes(oss))], PARTS)


def large_nbytes(oss: OSS) -> list[list[int]]:
    """Bytes of states that may live far, of each bucket on each rank: of what is trained, those of large pieces that
    have an element for each of theirs."""
    each = _each(oss)
    found = []
    for laid in oss.pieces.laid:
        group, of_ranks = oss.group_of[laid.bucket.items[0]], [0] * oss.exchange.ranks
        for piece in laid.bucket.pieces:
            parameter = oss.pieces.parameters[piece.item]
            if parameter.requires_grad and piece.count * parameter.element_size() >= SMALLEST_HOME:
                of_ranks[piece.rank] += piece.count * each[group, parameter.dtype]
        found.append(of_ranks)
    return found


def _each(oss: OSS) -> dict[tuple[int, torch.dtype], int]:
    """Bytes of states for an element of a parameter of each group and type."""
    given = [options(group) | {"params": list(group["params"])} for group in oss.param_groups]
    stepper = ClonedOptimizer(clone_optimizer(oss.inner, given))
    kinds = {(group, p.dtype) for group, p in zip(oss.group_of, oss.pieces.parameters, strict=True)}
    return {kind: sum(dtype.itemsize for dtype in stepper.state_dtypes(*kind).values() if dtype) for kind in kinds}
