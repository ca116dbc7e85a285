"""Reduce and gather buckets by one message from each rank to each other.

    reduce, 3 ranks, on rank 1:    elements of rank 0 -> rank 0     own elements <- ranks 0 and 2, added in rank order
                                   elements of rank 2 -> rank 2

Shares may be of any size, so nothing is padded. Gradients are added in the same order whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import copy_into, joined, to_wire, to_wire_dtype
from .rank_group import RankGroup

TAG = 5  # of messages between two ranks; other users of the group have 0
Message = tuple[dist.Work, Tensor]  # the tensor has to stay alive until the message has arrived


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
