"""A message from each rank to each other: what is one stretch goes from where it is, and comes where it belongs.

    reduce, 3 ranks, on rank 1:    g of 0 -> rank 0          g of 1 <- ranks 0 and 2, added in the order of ranks
                                   g of 2 -> rank 2

Parts may be of any size, so nothing is padded. Gradients are added in the same order whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .parcels import joined, narrowed, put, split, wire_type
from .watchdog import CollectiveWatchdog

TAG = 5  # of messages between two ranks; those of others in the same group have 0
NUMBERS = 7  # the tag of numbers that each rank tells all: they need not wait behind buckets
Message = tuple[dist.Work, Tensor]  # with what has to live until it has gone


class P2PComm:
    """Messages between the ranks of a group."""

    def __init__(self, watch: CollectiveWatchdog, wire: torch.dtype | None) -> None:
        self.watch, self.group, self.wire = watch, watch.group, wire
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.others = [rank for rank in range(self.ranks) if rank != self.rank]

    def reduce(self, sources: Sequence[Sequence[Tensor]]) -> Callable[[], list[Tensor]]:
        """Send each rank what is its own, and add what comes."""
        messages, parts = [], {}
        if mine := sources[self.rank]:
            own = joined(mine)
            for rank in self.others:
                parts[rank] = own.new_empty(own.numel(), dtype=wire_type(own.dtype, self.wire))
                messages.append(self._receive(parts[rank], rank))
            parts[self.rank] = own
        messages += [self._send(joined(sources[rank]), rank) for rank in self.others if sources[rank]]

        def wait() -> list[Tensor]:
            self._wait(messages)
            return split(self._mean(parts), [source.numel() for source in mine]) if mine else []

        return wait

    def gather(self, views: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        """Send what is mine to each rank, and put what comes where it belongs."""
        messages, rooms = [], []
        if mine := views[self.rank]:
            own = joined(mine)
            sent = narrowed(own, self.wire)
            if sent is not own:
                put(sent, mine)  # so that all ranks have the same
            messages += [self._send(sent, rank) for rank in self.others]
        for rank in self.others:
            if views[rank]:
                room = self._room(views[rank])
                messages.append(self._receive(room, rank))
                rooms.append((room, views[rank]))

        def wait() -> None:
            self._wait(messages)
            for room, theirs in rooms:
                if room.data_ptr() == theirs[0].data_ptr():
                    torch.autograd.graph.increment_version(theirs[0])
                else:
                    put(room, theirs)

        return wait

    def each(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Begin to tell all ranks the same numbers.

        gloo's collectives are run by a thread of its own, which lets go of their tensors some time after the wait for
        them has ended. Nobody else holds those of a message.

        Returns:
            waits, and gives the numbers of each rank, a row for each
        """
        rows = numbers.new_empty(self.ranks, *numbers.shape)
        rows[self.rank] = numbers
        messages = [self._receive(rows[rank], rank, NUMBERS) for rank in self.others]
        messages += [self._posted(rows[self.rank], rank, NUMBERS) for rank in self.others]

        def wait() -> Tensor:
            self._wait(messages)
            return rows

        return wait

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Tensors as they are, to one rank that receives them."""
        with self.watch.naming(f"sending to rank {rank}"):
            self._wait([self._posted(tensor.contiguous(), rank) for tensor in tensors])

    def receive(self, rooms: Sequence[Tensor], rank: int) -> None:
        """What a rank sends."""
        with self.watch.naming(f"receiving from rank {rank}"):
            self._wait([self._receive(room, rank) for room in rooms])

    def _room(self, views: Sequence[Tensor]) -> Tensor:
        """Where the elements of some views are received: in the one that there is, if they may be."""
        first = views[0]
        dtype = wire_type(first.dtype, self.wire)
        if len(views) == 1 and first.is_contiguous() and dtype == first.dtype:
            return first.view(-1)
        return first.new_empty(sum(view.numel() for view in views), dtype=dtype)

    def _send(self, tensor: Tensor, rank: int) -> Message:
        return self._posted(narrowed(tensor, self.wire), rank)

    def _posted(self, sent: Tensor, rank: int, tag: int = TAG) -> Message:
        work = dist.isend(sent, group=self.group, group_dst=rank, tag=tag)
        assert work is not None
        return work, sent

    def _receive(self, room: Tensor, rank: int, tag: int = TAG) -> Message:
        work = dist.irecv(room, group=self.group, group_src=rank, tag=tag)
        assert work is not None
        return work, room

    def _mean(self, parts: dict[int, Tensor]) -> Tensor:
        """The mean of what the ranks have, added in their order, in the place of what came."""
        first, second, *others = (parts[rank] for rank in range(self.ranks))
        own = parts[self.rank]
        if any(part.dtype != own.dtype for part in parts.values()):
            total = own.new_zeros(own.numel())
            for part in (first, second, *others):
                total.add_(part)
        else:
            total = torch.add(first, second, out=second if first is own else first)
            for part in others:
                total.add_(part)
        return total.div_(self.ranks)

    def _wait(self, messages: Sequence[Message]) -> None:
        for work, _ in messages:
            self.watch.wait(work)
