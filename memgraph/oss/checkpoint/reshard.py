"""Elements of a tensor on their way between the pieces of the optimizer and the rows that a DTensor has on each rank.

    pieces  [0:6] to 0 | [6:8] to 1      rows of 2, four in all: [0:4] to 0 | [4:8] to 1
    ->      4:6 from 0 to 1, and all the rest stays

One message from each rank to each, of one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from passes.shards import Piece

from ...tensors.layout import flat
from ..comm.watchdog import CollectiveWatchdog
from .state_outline import Kind

Key = tuple[int, int]  # a piece: its parameter, and where it begins


def key(piece: Piece) -> Key:
    """By what a piece is known."""
    return piece.item, piece.begin


@dataclass(frozen=True)
class Rows:
    """How one dimension of a parameter is divided among ranks: the one that is outermost in memory."""

    dim: int
    bounds: tuple[int, ...]  # rank r has elements [bounds[r], bounds[r + 1]) as they lie in memory
    each: int  # elements of one row

    def local(self, rank: int, kind: Kind, device: torch.device) -> Tensor:
        """Room for what a rank has."""
        shape = list(kind.shape)
        shape[self.dim] = (self.bounds[rank + 1] - self.bounds[rank]) // self.each
        return torch.empty_strided(shape, kind.strides, dtype=kind.dtype, device=device)


def rows_of(kind: Kind, ranks: int) -> Rows:
    """The rows of such a tensor, as many for each rank as DTensor's `Shard` gives it."""
    dim = max(range(len(kind.shape)), key=lambda d: (kind.shape[d] > 1, kind.strides[d], -d))
    count, each = kind.shape[dim], math.prod(kind.shape) // kind.shape[dim]
    part = -(-count // ranks)
    return Rows(dim, tuple(min(rank * part, count) * each for rank in range(ranks + 1)), each)


@dataclass(frozen=True)
class Overlap:
    """Elements [begin, end) of a parameter: of a piece of one rank, in the rows of another."""

    piece: Piece
    rank: int
    begin: int
    end: int


def overlaps(pieces: Sequence[Piece], rows: Rows) -> Iterator[Overlap]:
    """What each piece has of each rank's rows."""
    for piece in pieces:
        for rank, (first, last) in enumerate(pairwise(rows.bounds)):
            begin, end = max(first, piece.begin), min(last, piece.end)
            if begin < end:
                yield Overlap(piece, rank, begin, end)


class Transfer:
    """One tensor on its way between pieces and rows, on all ranks at once."""

    def __init__(self, watchdog: CollectiveWatchdog, kind: Kind, pieces: Sequence[Piece], rows: Rows) -> None:
        self.watchdog, self.kind, self.me = watchdog, kind, watchdog.group.rank()
        self.overlaps = list(overlaps(pieces, rows))
        self.base = rows.bounds[self.me]
        self.name = f"exchange of the state of parameter {pieces[0].item}"

    def to_rows(self, mine: Mapping[Key, Tensor], local: Tensor) -> None:
        """Fill this rank's rows, `local`; `mine` are its pieces, flat."""
        sent = [o for o in self.overlaps if o.piece.rank == self.me]
        parts = [mine[key(o.piece)][o.begin - o.piece.begin : o.end - o.piece.begin] for o in sent]
        wanted = [o for o in self.overlaps if o.rank == self.me]
        found = self._exchange(sent, parts, wanted, lambda o: o.rank, lambda o: o.piece.rank)
        for overlap, part in found:
            flat(local)[overlap.begin - self.base : overlap.end - self.base].copy_(part)

    def to_pieces(self, local: Tensor) -> dict[Key, Tensor]:
        """This rank's pieces, flat and in host memory, of the rows that the ranks have."""
        sent = [o for o in self.overlaps if o.rank == self.me]
        parts = [flat(local)[o.begin - self.base : o.end - self.base] for o in sent]
        wanted = [o for o in self.overlaps if o.piece.rank == self.me]
        whole = {key(o.piece): torch.empty(o.piece.count, dtype=self.kind.dtype) for o in wanted}
        for o, part in self._exchange(sent, parts, wanted, lambda o: o.piece.rank, lambda o: o.rank):
            whole[key(o.piece)][o.begin - o.piece.begin : o.end - o.piece.begin].copy_(part)
        return whole

    def _exchange(
        self,
        sent: Sequence[Overlap],
        parts: Sequence[Tensor],
        wanted: Sequence[Overlap],
        receiver: Callable[[Overlap], int],
        sender: Callable[[Overlap], int],
    ) -> list[tuple[Overlap, Tensor]]:
        """What the others have for this rank; both sides go through the overlaps in the same order."""
        ranks = range(len(self.watchdog.members))
        to = [[part for o, part in zip(sent, parts, strict=True) if receiver(o) == rank] for rank in ranks]
        ordered = [o for rank in ranks for o in wanted if sender(o) == rank]
        size = self.kind.dtype.itemsize
        splits = [sum(part.numel() for part in each) * size for each in to]
        froms = [sum(o.end - o.begin for o in wanted if sender(o) == rank) * size for rank in ranks]
        message = torch.cat([torch.empty(0, dtype=self.kind.dtype), *(part.cpu() for each in to for part in each)])
        received = self._all_to_all(message.view(torch.uint8), splits, froms).view(self.kind.dtype)
        return list(zip(ordered, received.split([o.end - o.begin for o in ordered]), strict=True))

    def _all_to_all(self, message: Tensor, splits: list[int], froms: list[int]) -> Tensor:
        if len(self.watchdog.members) == 1:
            return message
        received = torch.empty(sum(froms), dtype=torch.uint8, device=self.watchdog.device)
        given = message.to(self.watchdog.device)
        with self.watchdog.naming(self.name):
            work = dist.all_to_all_single(received, given, froms, splits, group=self.watchdog.group, async_op=True)
            self.watchdog.wait(work)
        return received.cpu()
