"""Send a bucket between ranks: gradients to whom they belong, and parameters from whom they belong to.

    reduce   g of all elements, on each rank    ->   the mean over ranks, of the elements that are mine
    gather   p of the elements that are mine    ->   p of all elements, on each rank

Both are begun, and later waited for: meanwhile other buckets are packed and updated. Every rank begins them in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from passes.shards import Bucket, Piece

Begun = Callable[[], Tensor]


class Exchange:
    """The ranks of a process group, and how they exchange buckets."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    @property
    def is_alone(self) -> bool:
        return self.ranks == 1

    def most(self, numbers: Tensor) -> Tensor:
        """The largest of each number over all ranks, in place."""
        if not self.is_alone:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return numbers

    def reduce(self, bucket: Bucket, sources: Sequence[Tensor | None], like: Tensor) -> Begun:
        """Begin to average what all ranks have of the elements of a bucket, one source for each piece.

        Returns:
            waits, and gives the elements of this rank's part; none if another owns the bucket
        """
        packed = self._packed(bucket, sources, like)
        if self.is_alone:
            return lambda: packed
        if bucket.owner is not None:
            work = dist.reduce(packed, group=self.group, group_dst=bucket.owner, async_op=True)
            return lambda: self._mean(work, packed if bucket.owner == self.rank else packed[:0])
        part = packed.new_empty(bucket.part)
        work = dist.reduce_scatter_tensor(part, packed, group=self.group, async_op=True)
        return lambda: self._mean(work, part)

    def own(self, bucket: Bucket, sources: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """The elements of this rank's part of what all ranks have the same of."""
        if bucket.owner is not None:
            return self._packed(bucket, sources, like) if bucket.owner == self.rank else like.new_empty(0)
        mine = [
            source if piece.rank == self.rank else None for piece, source in zip(bucket.pieces, sources, strict=True)
        ]
        return self._packed(bucket, mine, like, self.rank)

    def gather(self, bucket: Bucket, views: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to send this rank's pieces of a bucket to all; `views` are where its pieces are read and put.

        Returns:
            waits, and puts what the others sent where it belongs
        """
        if self.is_alone:
            return lambda: None
        if bucket.owner is not None:
            sent = self._packed(bucket, views, views[0])
            work = dist.broadcast(sent, group=self.group, group_src=bucket.owner, async_op=True)
            return lambda: self._put(work, sent, bucket, views)
        mine = [view if piece.rank == self.rank else None for piece, view in zip(bucket.pieces, views, strict=True)]
        part = self._packed(bucket, mine, views[0], self.rank)
        whole = part.new_empty(self.ranks * bucket.part)
        work = dist.all_gather_into_tensor(whole, part, group=self.group, async_op=True)
        return lambda: self._put(work, whole, bucket, views)

    def _packed(
        self, bucket: Bucket, sources: Sequence[Tensor | None], like: Tensor, rank: int | None = None
    ) -> Tensor:
        """The sources where they lie in the bucket, or in a rank's part of it; zeros where there is none."""
        first = 0 if rank is None else rank * bucket.part
        count = bucket.part * (self.ranks if rank is None and bucket.owner is None else 1)
        packed = like.new_zeros(count)
        for piece, source in zip(bucket.pieces, sources, strict=True):
            if source is not None:
                packed[piece.at - first : piece.at - first + piece.count].copy_(source.reshape(-1))
        return packed

    def _mean(self, work: dist.Work, part: Tensor) -> Tensor:
        work.wait()
        return part.div_(self.ranks)

    def _put(self, work: dist.Work, whole: Tensor, bucket: Bucket, views: Sequence[Tensor]) -> None:
        work.wait()
        for piece, view in zip(bucket.pieces, views, strict=True):
            if piece.rank != self.rank:
                view.copy_(whole[piece.at : piece.at + piece.count].view(view.shape))


def place(piece: Piece, bucket: Bucket) -> slice:
    """Where a piece lies in the part of its rank."""
    first = piece.at - (piece.rank * bucket.part if bucket.owner is None else 0)
    return slice(first, first + piece.count)


def on(exchange: Exchange, device: torch.device) -> torch.device:
    """Where small tensors are to lie that are sent: gloo takes those of the CPU, NCCL those of the device."""
    return device if dist.get_backend(exchange.group) == "nccl" else torch.device("cpu")
