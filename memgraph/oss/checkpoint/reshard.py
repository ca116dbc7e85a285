"""Move elements of a tensor between the optimizer's shards and the rows of a DTensor.

    shards  [0:6] of 0 | [6:8] of 1      rows of 2, four in all: [0:4] of 0 | [4:8] of 1
    ->      elements 4:6 go from rank 0 to rank 1, the rest stays

Each rank sends one message to each other rank, for one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from passes.shards import ShardRange

from ...tensors.layout import flat
from ..comm.watchdog import CollectiveWatchdog
from .own_state import Key, key
from .state_outline import Kind


@dataclass(frozen=True)
class Rows:
    """A tensor divided among ranks along the dimension that is outermost in memory."""

    dim: int
    bounds: tuple[int, ...]  # rank r has elements [bounds[r], bounds[r + 1]) in memory order
    row_size: int  # elements

    def local(self, rank: int, kind: Kind, device: torch.device) -> Tensor:
        shape = list(kind.shape)
        shape[self.dim] = (self.bounds[rank + 1] - self.bounds[rank]) // self.row_size
        return torch.empty_strided(shape, kind.strides, dtype=kind.dtype, device=device)


def rows_of(kind: Kind, ranks: int) -> Rows:
    """Divide a tensor into as many rows for each rank as DTensor's `Shard` does."""
    dim = max(range(len(kind.shape)), key=lambda d: (kind.shape[d] > 1, kind.strides[d], -d))
    count, row_size = kind.shape[dim], math.prod(kind.shape) // kind.shape[dim]
    part = -(-count // ranks)
    return Rows(dim, tuple(min(rank * part, count) * row_size for rank in range(ranks + 1)), row_size)


@dataclass(frozen=True)
class Overlap:
    """Elements [begin, end) of a parameter that are in `shard` and in the rows of `rank`."""

    shard: ShardRange
    rank: int
    begin: int
    end: int

    def of_shard(self) -> slice:
        return slice(self.begin - self.shard.begin, self.end - self.shard.begin)

    def of_rows(self, first: int) -> slice:
        return slice(self.begin - first, self.end - first)


def overlaps(shards: Sequence[ShardRange], rows: Rows) -> Iterator[Overlap]:
    for shard in shards:
        for rank, (first, last) in enumerate(pairwise(rows.bounds)):
            begin, end = max(first, shard.begin), min(last, shard.end)
            if begin < end:
                yield Overlap(shard, rank, begin, end)


class Transfer:
    """One tensor between shards and rows, on all ranks at once."""

    def __init__(self, watchdog: CollectiveWatchdog, kind: Kind, shards: Sequence[ShardRange], rows: Rows) -> None:
        self.watchdog, self.kind, self.rank = watchdog, kind, watchdog.group.rank()
        every = list(overlaps(shards, rows))
        self.in_shards = [each for each in every if each.shard.rank == self.rank]
        self.in_rows = [each for each in every if each.rank == self.rank]
        self.first = rows.bounds[self.rank]
        self.name = f"exchange of the state of parameter {shards[0].param}"

    def to_rows(self, shards: Mapping[Key, Tensor], local: Tensor) -> None:
        """Fill this rank's rows, `local`, from the flat shards of all ranks."""
        parts = [shards[key(each.shard)][each.of_shard()] for each in self.in_shards]
        to, source = [each.rank for each in self.in_shards], lambda each: each.shard.rank
        for each, part in self._exchange(parts, to, self.in_rows, source):
            flat(local)[each.of_rows(self.first)].copy_(part)

    def to_shards(self, local: Tensor) -> dict[Key, Tensor]:
        """Return this rank's shards, flat and in host memory, from the rows of all ranks."""
        parts = [flat(local)[each.of_rows(self.first)] for each in self.in_rows]
        to, source = [each.shard.rank for each in self.in_rows], lambda each: each.rank
        shards = {key(each.shard): torch.empty(each.shard.count, dtype=self.kind.dtype) for each in self.in_shards}
        for each, part in self._exchange(parts, to, self.in_shards, source):
            shards[key(each.shard)][each.of_shard()].copy_(part)
        return shards

    def _exchange(
        self, parts: Sequence[Tensor], to: Sequence[int], wanted: Sequence[Overlap], source: Callable[[Overlap], int]
    ) -> list[tuple[Overlap, Tensor]]:
        """Send parts to ranks, and return what arrives; both sides have the same order of overlaps."""
        ranks, size = range(len(self.watchdog.members)), self.kind.dtype.itemsize
        sent = [[part for part, rank in zip(parts, to, strict=True) if rank == each] for each in ranks]
        ordered = [each for rank in ranks for each in wanted if source(each) == rank]
        sent_nbytes = [sum(part.numel() for part in each) * size for each in sent]
        received_nbytes = [sum(o.end - o.begin for o in wanted if source(o) == rank) * size for rank in ranks]
        message = torch.cat([torch.empty(0, dtype=self.kind.dtype), *(part.cpu() for each in sent for part in each)])
        received = self._all_to_all(message.view(torch.uint8), sent_nbytes, received_nbytes).view(self.kind.dtype)
        return list(zip(ordered, received.split([each.end - each.begin for each in ordered]), strict=True))

    def _all_to_all(self, message: Tensor, sent_nbytes: list[int], received_nbytes: list[int]) -> Tensor:
        if len(self.watchdog.members) == 1:
            return message
        received = torch.empty(sum(received_nbytes), dtype=torch.uint8, device=self.watchdog.device)
        given, group = message.to(self.watchdog.device), self.watchdog.group
        with self.watchdog.naming(self.name):
            work = dist.all_to_all_single(received, given, received_nbytes, sent_nbytes, group=group, async_op=True)
            self.watchdog.wait(work)
        return received.cpu()
