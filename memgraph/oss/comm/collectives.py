"""Reduce-scatter and all-gather of a bucket, packed into one tensor of equal parts.

    w[0:4] to 0 | w[4:7] to 1 | b[0:1] to 1    ->   reduce_scatter(f32[8]) gives f32[4] on each rank

A bucket of a single owner is reduced to him, and broadcast from him.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes.shards import Bucket

from .parcels import narrowed, put, wire_type
from .watchdog import CollectiveWatchdog

# Their names before torch 2.13.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveComm:
    """The collectives of a group."""

    def __init__(self, watchdog: CollectiveWatchdog, wire: torch.dtype | None) -> None:
        self.watchdog, self.group, self.wire = watchdog, watchdog.group, wire
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)

    def reduce(self, bucket: Bucket, sources: Sequence[Sequence[Tensor]]) -> Callable[[], list[Tensor]]:
        """The mean over ranks of what this one owns."""
        like = next(source for of_rank in sources for source in of_rank)
        is_rounded = wire_type(like.dtype, self.wire) != like.dtype
        # A sum in a narrow type may leave its range where the mean does not.
        given = [[source / self.ranks for source in of_rank] for of_rank in sources] if is_rounded else sources
        packed = self._packed(bucket, given, like)
        if bucket.owner is not None:
            part, kept = packed, dist.reduce(packed, group=self.group, group_dst=bucket.owner, async_op=True)
        else:
            part = packed.new_empty(bucket.part)
            kept = _reduce_scatter(part, packed, group=self.group, async_op=True)

        def wait() -> list[Tensor]:
            assert packed is not None and kept is not None  # both have to live until here
            self.watchdog.wait(kept)
            mean = part.to(like.dtype) if is_rounded else part.div_(self.ranks)
            return self._unpacked(bucket, mean, self.rank)

        return wait

    def packed(self, whole: Tensor) -> Callable[[], Tensor]:
        """The mean over ranks of this one's part of elements that are packed already."""
        is_rounded = wire_type(whole.dtype, self.wire) != whole.dtype
        sent = narrowed(whole / self.ranks, self.wire) if is_rounded else whole
        part = sent.new_empty(sent.numel() // self.ranks)
        work = _reduce_scatter(part, sent, group=self.group, async_op=True)

        def wait() -> Tensor:
            assert sent is not None and work is not None  # both have to live until here
            self.watchdog.wait(work)
            return part.to(whole.dtype) if is_rounded else part.div_(self.ranks)

        return wait

    def gather(self, bucket: Bucket, views: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        """What this rank owns, to all."""
        like = next(view for of_rank in views for view in of_rank)
        only = [of_rank if rank == self.rank else [] for rank, of_rank in enumerate(views)]
        whole = self._packed(bucket, only, like)
        if whole.dtype != like.dtype and only[self.rank]:
            self._put(bucket, whole, views, self.rank)  # so that all ranks have the same
        if bucket.owner is not None:
            work = dist.broadcast(whole, group=self.group, group_src=bucket.owner, async_op=True)
        else:
            part = whole[self.rank * bucket.part : (self.rank + 1) * bucket.part].clone()
            work = _all_gather(whole, part, group=self.group, async_op=True)

        def wait() -> None:
            assert work is not None
            self.watchdog.wait(work)
            for rank in range(self.ranks):
                if rank != self.rank and views[rank]:
                    self._put(bucket, whole, views, rank)

        return wait

    def _packed(self, bucket: Bucket, sources: Sequence[Sequence[Tensor]], like: Tensor) -> Tensor:
        """The sources where they lie in the bucket, zeros where nothing lies."""
        count = bucket.part * (self.ranks if bucket.owner is None else 1)
        packed = like.new_zeros(count, dtype=wire_type(like.dtype, self.wire))
        for rank, of_rank in enumerate(sources):
            for piece, source in zip(bucket.stretches(rank), of_rank, strict=False):
                packed[piece.at : piece.at + piece.count].copy_(narrowed(source.reshape(-1), self.wire))
        return packed

    def _unpacked(self, bucket: Bucket, part: Tensor, rank: int) -> list[Tensor]:
        first = rank * bucket.part if bucket.owner is None else 0
        return [part[piece.at - first : piece.at - first + piece.count] for piece in bucket.stretches(rank)]

    def _put(self, bucket: Bucket, whole: Tensor, views: Sequence[Sequence[Tensor]], rank: int) -> None:
        stretches = bucket.stretches(rank)
        put(torch.cat([whole[piece.at : piece.at + piece.count] for piece in stretches]), views[rank])
