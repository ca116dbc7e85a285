"""Lay parameters into buckets, and say which elements of them each rank owns.

    w f32[7]  b f32[1]  v f32[4], 2 ranks   ->   bucket 0 of 2 x 6: w[0:6] to 0 | w[6:7] b[0:1] v[0:4] to 1

Elements are counted as they lie in memory. Parameters of one kind (one group, dtype and device, frozen or not) lie one
behind the other; rank r of N owns the r-th of N equal parts of each bucket. A long stretch of one parameter is a bucket
alone, and a multiple of N: it can be sent from where it is, and received where it belongs.

Whole parameters are never cut: each is owned by whoever has least, the largest first, in buckets of one owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True)
class Item:
    """A parameter: its elements, their bytes, and of which kind it is."""

    count: int
    itemsize: int
    kind: int
    whole: bool = False  # all of it belongs to one rank
    quantum: int = 1  # elements between places where it may be cut

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of an item, `at` elements from the begin of the bucket, and who owns them."""

    item: int
    begin: int
    end: int
    rank: int
    at: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.item}[{self.begin}:{self.end}] to {self.rank}"


@dataclass(frozen=True)
class Bucket:
    """Pieces that are sent together, in the order in which they lie.

    A bucket of equal parts is N times `part` elements, the last of which may belong to nobody; one of a single owner has
    `part` elements.
    """

    kind: int
    pieces: tuple[Piece, ...]
    part: int
    owner: int | None = None

    def of(self, rank: int) -> tuple[Piece, ...]:
        """What this rank owns of it."""
        return tuple(piece for piece in self.pieces if piece.rank == rank)

    @property
    def items(self) -> tuple[int, ...]:
        """The items that are in it, each once."""
        return tuple(dict.fromkeys(piece.item for piece in self.pieces))

    @property
    def is_one_stretch(self) -> bool:
        """Whether it is elements of one item and nothing else."""
        return len(self.items) == 1

    def behind(self, count: int) -> Bucket:
        """The same, where so many other items come first."""
        return replace(self, pieces=tuple(replace(piece, item=piece.item + count) for piece in self.pieces))

    def __str__(self) -> str:
        parts = f"{self.part}" if self.owner is not None else f"parts of {self.part}"
        return f"bucket of {parts}: " + " ".join(map(str, self.pieces))


Stretch = tuple[int, int, int]  # an item, and from where to where


def shards(items: Sequence[Item], ranks: int, nbytes: int, alone: int) -> tuple[Bucket, ...]:
    """The buckets of these items, each of at most `nbytes`; a stretch of `alone` bytes or more has its own.

    The same items give the same buckets on every rank.
    """
    ordered = sorted(range(len(items)), key=lambda i: items[i].kind)
    found: list[Bucket] = []
    for kind, members in groupby(ordered, key=lambda i: items[i].kind):
        mine = list(members)
        cut = [i for i in mine if not items[i].whole]
        found += _ranges(kind, cut, items, ranks, nbytes, alone)
        found += _wholes(kind, [i for i in mine if items[i].whole], items, ranks, nbytes)
    return tuple(found)


def _ranges(
    kind: int, members: Sequence[int], items: Sequence[Item], ranks: int, nbytes: int, alone: int
) -> Iterator[Bucket]:
    together: list[Stretch] = []
    for i in members:
        item = items[i]
        step = ranks * item.quantum
        begin = 0
        while (item.count - begin) * item.itemsize >= max(alone, step * item.itemsize):
            count = min(item.count - begin, max(nbytes // item.itemsize, step)) // step * step
            yield _equal(kind, [(i, begin, begin + count)], items, ranks)
            begin += count
        if begin < item.count or not item.count:
            together.append((i, begin, item.count))
    for stretches in _filled(together, items, nbytes):
        yield _equal(kind, stretches, items, ranks)


def _filled(stretches: Iterable[Stretch], items: Sequence[Item], nbytes: int) -> Iterator[list[Stretch]]:
    """Stretches in the same order, together as long as they fit."""
    filled: list[Stretch] = []
    room = nbytes
    for item, begin, end in stretches:
        wanted = (end - begin) * items[item].itemsize
        if filled and wanted > room:
            yield filled
            filled, room = [], nbytes
        filled.append((item, begin, end))
        room -= wanted
    if filled:
        yield filled


def _equal(kind: int, stretches: Sequence[Stretch], items: Sequence[Item], ranks: int) -> Bucket:
    """One bucket, cut into a part for each rank."""
    quantum = max(items[item].quantum for item, _, _ in stretches)
    # Each stretch begins at a place where one may be cut, so that every cut is at one.
    rooms = [-(-(end - begin) // quantum) * quantum for _, begin, end in stretches]
    part = -(-sum(rooms) // (ranks * quantum)) * quantum
    pieces: list[Piece] = []
    at = 0
    for (item, begin, end), room in zip(stretches, rooms, strict=True):
        pieces += _cut(Piece(item, begin, end, 0, at), part, ranks)
        at += room
    return Bucket(kind, tuple(pieces), part)


def _cut(whole: Piece, part: int, ranks: int) -> Iterator[Piece]:
    """The pieces of a stretch that lie in the part of each rank; one that is empty lies in one part, too."""
    first = min(whole.at // part, ranks - 1) if part else 0
    if not whole.count:
        yield Piece(whole.item, whole.begin, whole.end, first, whole.at)
        return
    begin, at = whole.begin, whole.at
    for rank in range(first, ranks):
        end = min(whole.end, begin + (rank + 1) * part - at)
        yield Piece(whole.item, begin, end, rank, at)
        at += end - begin
        begin = end
        if begin == whole.end:
            return


def _wholes(kind: int, members: Sequence[int], items: Sequence[Item], ranks: int, nbytes: int) -> Iterator[Bucket]:
    loads = [0] * ranks
    owned: list[list[Stretch]] = [[] for _ in range(ranks)]
    for i in sorted(members, key=lambda i: -items[i].nbytes):
        # What has no elements still has a state, and takes a place.
        owner = min(range(ranks), key=lambda rank: (loads[rank], len(owned[rank])))
        loads[owner] += items[i].nbytes
        owned[owner].append((i, 0, items[i].count))
    for owner, stretches in enumerate(owned):
        for filled in _filled(stretches, items, nbytes):
            pieces, at = [], 0
            for item, begin, end in filled:
                pieces.append(Piece(item, begin, end, owner, at))
                at += end - begin
            yield Bucket(kind, tuple(pieces), at, owner)
