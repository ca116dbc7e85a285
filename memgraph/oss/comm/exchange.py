"""Reduce a bucket to the ranks that own its elements, and gather it from them.

    reduce   gradients of all elements, on each rank   ->   their mean over ranks, for this rank's elements
    gather   parameters of this rank's elements        ->   parameters of all elements, on each rank

Both start at once and return a function that waits, so other buckets are packed and updated meanwhile. Every rank
starts them in the same order. From the CPU, buckets go as `P2PComm`: with gloo, messages move a bucket of 24 MiB
between two ranks in a sixth of the time of reduce-scatter and in half the time of all-gather.

Reduce and gather buckets by one message from each rank to each other.

    reduce, 3 ranks, on rank 1:    elements of rank 0 -> rank 0     own elements <- ranks 0 and 2, added in rank order
                                   elements of rank 2 -> rank 2

Shares may be of any size, so nothing is padded. Gradients are added in the same order whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from passes.shards import Bucket

from ...storage.wire_cast import fits_dtype
from .collectives import CollectiveComm, copy_into, joined, op_name, to_wire, to_wire_dtype
from .rank_group import RankGroup
from .shared_memory import SharedMemoryComm
from .watchdog import CollectiveWatchdog

T = TypeVar("T")
Stretches = Sequence[Sequence[Tensor]]  # of each rank, flat
TAG = 5  # of messages between two ranks; other users of the group have 0
Message = tuple[dist.Work, Tensor]  # the tensor has to stay alive until the message has arrived


class BucketComm(RankGroup):
    """The ranks of a process group, and their transports. `shared_memory` is None if ranks can't read each other."""

    def __init__(self, watchdog: CollectiveWatchdog, wire: torch.dtype | None = None) -> None:
        super().__init__(watchdog)
        self.wire = wire
        self.p2p, self.collectives = P2PComm(self, wire), CollectiveComm(self, wire)
        self.shared_memory: SharedMemoryComm | None = None

    def exact(self) -> BucketComm:
        return BucketComm(self.watchdog)

    def fits_wire(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if no finite number becomes infinite in the wire dtype."""
        if self.wire is None or self.is_alone:
            return True
        return all(fits_dtype(tensor, self.wire) for tensor in tensors if tensor.dtype == torch.float32)

    def reduce(self, bucket: Bucket, grads: Stretches) -> Callable[[], list[Tensor]]:
        """Start to average a bucket; the function waits and returns the mean of this rank's stretches."""
        own = list(grads[self.rank])
        if self.is_alone:
            return lambda: own
        name = f"averaging of the gradients of {op_name(bucket.params)}"
        with self.watchdog.naming(name):
            wait = self.p2p.reduce(grads) if _on_cpu(grads) else self.collectives.reduce(bucket, grads)
        return self._named(wait, name)

    def reduce_packed(self, bucket: Bucket, packed: Tensor) -> Callable[[], Tensor]:
        """Start to average a bucket that is packed into equal parts; the function returns this rank's part."""
        name = f"averaging of the gradients of {op_name(bucket.params or [0])} in backward"
        with self.watchdog.naming(name):
            if packed.device.type != "cpu":
                return self._named(self.collectives.reduce_packed(packed), name)
            wait = self.p2p.reduce([[part] for part in packed.split(bucket.shard_size)])
        return self._named(lambda: wait()[0], name)

    def gather(self, bucket: Bucket, views: Stretches) -> Callable[[], None]:
        """Start to send this rank's stretches to all ranks, and to receive theirs into the views."""
        if self.is_alone:
            return lambda: None
        name = f"gathering of {op_name(bucket.params)}"
        with self.watchdog.naming(name):
            wait = self.p2p.gather(views) if _on_cpu(views) else self.collectives.gather(bucket, views)
        return self._named(wait, name)

    def _named(self, wait: Callable[[], T], name: str) -> Callable[[], T]:
        def named() -> T:
            with self.watchdog.naming(name):
                return wait()

        return named

    @property
    def shares_flags(self) -> bool:
        """Return True if ranks can exchange a flag at the end of a step without blocking a device."""
        return self.watchdog.device.type == "cpu"

    def any_rank(self, flag: bool) -> Callable[[], bool]:
        """Start to send a flag behind the buckets under way; the function returns True if any rank has it."""
        if self.is_alone or not self.shares_flags:
            return lambda: flag
        flags = torch.zeros(self.ranks, dtype=torch.uint8)
        flags[self.rank] = flag
        name = "exchange of whether the update has failed"
        with self.watchdog.naming(name):
            wait = self._named(self.p2p.gather([[each] for each in flags.split(1)]), name)

        def any_flag() -> bool:
            wait()
            return bool(flags.any())

        return any_flag


def _on_cpu(stretches: Stretches) -> bool:
    return all(tensor.device.type == "cpu" for of_rank in stretches for tensor in of_rank)


class P2PComm:
    """Messages between the ranks of a group; float32 is sent as `wire`."""

    def __init__(self, ranks: RankGroup, wire: torch.dtype | None) -> None:
        self.watchdog, self.group, self.wire = ranks.watchdog, ranks.group, wire
        self.rank, self.ranks = ranks.rank, ranks.ranks
        self.others = [rank for rank in range(self.ranks) if rank != self.rank]

    def reduce(self, grads: Sequence[Sequence[Tensor]]) -> Callable[[], list[Tensor]]:
        messages, parts = [], {}
        if own := grads[self.rank]:
            flat = joined(own)
            for rank in self.others:
                parts[rank] = flat.new_empty(flat.numel(), dtype=to_wire_dtype(flat.dtype, self.wire))
                messages.append(self._receive(parts[rank], rank))
            parts[self.rank] = flat
        messages += [self._send(to_wire(joined(grads[rank]), self.wire), rank) for rank in self.others if grads[rank]]

        def wait() -> list[Tensor]:
            self._wait(messages)
            return list(self._mean(parts).split([grad.numel() for grad in own])) if own else []

        return wait

    def gather(self, views: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        messages, buffers = [], []
        if own := views[self.rank]:
            flat = joined(own)
            sent = to_wire(flat, self.wire)
            if sent is not flat:
                copy_into(sent, own)  # round this rank's elements as the others receive them
            messages += [self._send(sent, rank) for rank in self.others]
        for rank in self.others:
            if views[rank]:
                buffer = self._buffer(views[rank])
                messages.append(self._receive(buffer, rank))
                buffers.append((buffer, views[rank]))

        def wait() -> None:
            self._wait(messages)
            for buffer, of_rank in buffers:
                if buffer.data_ptr() == of_rank[0].data_ptr():
                    torch.autograd.graph.increment_version(of_rank[0])
                else:
                    copy_into(buffer, of_rank)

        return wait

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        with self.watchdog.naming(f"sending to rank {rank}"):
            self._wait([self._send(tensor.contiguous(), rank) for tensor in tensors])

    def receive(self, buffers: Sequence[Tensor], rank: int) -> None:
        with self.watchdog.naming(f"receiving from rank {rank}"):
            self._wait([self._receive(buffer, rank) for buffer in buffers])

    def _buffer(self, views: Sequence[Tensor]) -> Tensor:
        """Return where to receive the elements of some views: in the view itself, if it is a single contiguous one."""
        first = views[0]
        dtype = to_wire_dtype(first.dtype, self.wire)
        if len(views) == 1 and first.is_contiguous() and dtype == first.dtype:
            return first.view(-1)
        return first.new_empty(sum(view.numel() for view in views), dtype=dtype)

    def _send(self, tensor: Tensor, rank: int) -> Message:
        work = dist.isend(tensor, group=self.group, group_dst=rank, tag=TAG)
        assert work is not None
        return work, tensor

    def _receive(self, buffer: Tensor, rank: int) -> Message:
        work = dist.irecv(buffer, group=self.group, group_src=rank, tag=TAG)
        assert work is not None
        return work, buffer

    def _mean(self, parts: dict[int, Tensor]) -> Tensor:
        """Average in rank order, in a received buffer where dtypes allow that."""
        first, second, *others = (parts[rank] for rank in range(self.ranks))
        own = parts[self.rank]
        if any(part.dtype != own.dtype for part in parts.values()):
            total, others = own.new_zeros(own.numel()), [first, second, *others]
        else:
            total = torch.add(first, second, out=second if first is own else first)
        for part in others:
            total.add_(part)
        return total.div_(self.ranks)

    def _wait(self, messages: Sequence[Message]) -> None:
        for work, _ in messages:
            self.watchdog.wait(work)
