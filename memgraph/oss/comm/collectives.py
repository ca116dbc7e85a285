"""Reduce-scatter and all-gather of a bucket, packed into one tensor of equal parts.

    w[0:4] of rank 0 | w[4:7] of rank 1 | b[0:1] of rank 1    ->   reduce_scatter(f32[8]) gives f32[4] on each rank

A bucket with a single owner is reduced to that rank, and broadcast from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes.shards import Bucket

from ...storage.wire_cast import narrow
from .rank_group import RankGroup

# Their names before torch 2.13.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveComm:
    """Collectives of a process group; float32 is sent as `wire`."""

    def __init__(self, ranks: RankGroup, wire: torch.dtype | None) -> None:
        self.watchdog, self.group, self.wire = ranks.watchdog, ranks.group, wire
        self.rank, self.ranks = ranks.rank, ranks.ranks

    def reduce(self, bucket: Bucket, grads: Sequence[Sequence[Tensor]]) -> Callable[[], list[Tensor]]:
        like = next(grad for of_rank in grads for grad in of_rank)
        is_rounded = to_wire_dtype(like.dtype, self.wire) != like.dtype
        # A sum in a narrow type may leave its range where the mean does not.
        given = [[grad / self.ranks for grad in of_rank] for of_rank in grads] if is_rounded else grads
        packed = self._pack(bucket, given, like)
        if bucket.owner is not None:
            part, work = packed, dist.reduce(packed, group=self.group, group_dst=bucket.owner, async_op=True)
        else:
            part = packed.new_empty(bucket.shard_size)
            work = _reduce_scatter(part, packed, group=self.group, async_op=True)

        def wait() -> list[Tensor]:
            assert packed is not None and work is not None  # keeps both alive
            self.watchdog.wait(work)
            mean = part.to(like.dtype) if is_rounded else part.div_(self.ranks)
            first = self.rank * bucket.shard_size if bucket.owner is None else 0
            return [mean[one.offset - first : one.offset - first + one.count] for one in bucket.ranges(self.rank)]

        return wait

    def reduce_packed(self, packed: Tensor) -> Callable[[], Tensor]:
        is_rounded = to_wire_dtype(packed.dtype, self.wire) != packed.dtype
        sent = to_wire(packed / self.ranks, self.wire) if is_rounded else packed
        part = sent.new_empty(sent.numel() // self.ranks)
        work = _reduce_scatter(part, sent, group=self.group, async_op=True)

        def wait() -> Tensor:
            assert sent is not None and work is not None  # keeps both alive
            self.watchdog.wait(work)
            return part.to(packed.dtype) if is_rounded else part.div_(self.ranks)

        return wait

    def gather(self, bucket: Bucket, views: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        like = next(view for of_rank in views for view in of_rank)
        own = [of_rank if rank == self.rank else [] for rank, of_rank in enumerate(views)]
        packed = self._pack(bucket, own, like)
        if packed.dtype != like.dtype and own[self.rank]:
            self._unpack(bucket, packed, views, self.rank)  # round this rank's elements as the others receive them
        if bucket.owner is not None:
            work = dist.broadcast(packed, group=self.group, group_src=bucket.owner, async_op=True)
        else:
            part = packed[self.rank * bucket.shard_size : (self.rank + 1) * bucket.shard_size].clone()
            work = _all_gather(packed, part, group=self.group, async_op=True)

        def wait() -> None:
            assert work is not None
            self.watchdog.wait(work)
            for rank in range(self.ranks):
                if rank != self.rank and views[rank]:
                    self._unpack(bucket, packed, views, rank)

        return wait

    def _pack(self, bucket: Bucket, stretches: Sequence[Sequence[Tensor]], like: Tensor) -> Tensor:
        count = bucket.shard_size * (self.ranks if bucket.owner is None else 1)
        packed = like.new_zeros(count, dtype=to_wire_dtype(like.dtype, self.wire))
        for rank, of_rank in enumerate(stretches):
            for one, tensor in zip(bucket.ranges(rank), of_rank, strict=False):
                packed[one.offset : one.offset + one.count].copy_(to_wire(tensor.reshape(-1), self.wire))
        return packed

    def _unpack(self, bucket: Bucket, packed: Tensor, views: Sequence[Sequence[Tensor]], rank: int) -> None:
        stretches = bucket.ranges(rank)
        copy_into(torch.cat([packed[one.offset : one.offset + one.count] for one in stretches]), views[rank])


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, flat; a single contiguous one is not copied."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def copy_into(whole: Tensor, views: Sequence[Tensor]) -> None:
    parts = whole.split([view.numel() for view in views])
    torch._foreach_copy_(list(views), [part.view(view.shape) for part, view in zip(parts, views, strict=True)])


def to_wire(tensor: Tensor, wire: torch.dtype | None) -> Tensor:
    """Round float32 to the wire dtype; leave other dtypes as they are."""
    return tensor if wire is None or tensor.dtype != torch.float32 else narrow(tensor, wire)


def to_wire_dtype(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    return dtype if wire is None or dtype != torch.float32 else wire


def op_name(items: Sequence[int]) -> str:
    """Name parameters by the first and the last, for errors."""
    first, last = min(items), max(items)
    return f"parameters {first} to {last}" if last > first else f"parameter {first}"
