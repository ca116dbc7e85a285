"""Lay parameters into buckets, and say which elements of them each rank owns.

    w f32[7]  b f32[1]  v f32[4], 2 ranks  ->  parts of 6: w[0:6] to 0 | w[6:7] to 1 | b[0:1] to 1 | v[0:4] to 1

Elements are counted as they lie in memory. Parameters of one kind (one group, dtype and device, frozen or not) lie one
behind the other; rank r of N owns the r-th of N equal parts of each bucket. A long stretch of one parameter is a bucket
alone, of equal parts without a rest: it can be sent from where it is, and received where it belongs.

Whole parameters are never cut: each is owned by whoever has least, the largest first, in buckets of one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True)
class ParamSpec:
    """A parameter: its elements, their bytes, and of which kind it is."""

    count: int
    itemsize: int
    kind: int
    whole: bool = False  # all of it belongs to one rank
    frozen: bool = False
    quantum: int = 1  # elements between places where it may be cut

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize


@dataclass(frozen=True)
class BucketSizes:
    """Bytes: the most in a bucket, the least in a bucket of one stretch, and the most in a piece (any, if None)."""

    bucket_nbytes: int
    single_nbytes: int
    shard_nbytes: int | None = None


@dataclass(frozen=True)
class ShardRange:
    """Elements [begin, end) of an item, `at` elements from the begin of the bucket, and who owns them."""

    param: int
    begin: int
    end: int
    rank: int
    offset: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.param}[{self.begin}:{self.end}] to {self.rank}"


@dataclass(frozen=True)
class Bucket:
    """Pieces that are sent together, in the order in which they lie.

    A bucket of equal parts is N times `part` elements, the last of which may belong to nobody; one of a single owner
    has `part` elements.
    """

    kind: int
    shards: tuple[ShardRange, ...]
    shard_size: int
    owner: int | None = None

    @property
    def params(self) -> tuple[int, ...]:
        """The items that are in it, each once."""
        return tuple(dict.fromkeys(piece.param for piece in self.shards))

    def owned_by(self, rank: int) -> tuple[ShardRange, ...]:
        """What this rank owns of it."""
        return tuple(piece for piece in self.shards if piece.rank == rank)

    def ranges(self, rank: int) -> tuple[ShardRange, ...]:
        """What this rank owns of it, joined where one piece goes on where another ends."""
        joined: list[ShardRange] = []
        for piece in self.owned_by(rank):
            if joined and joined[-1].param == piece.param:
                joined[-1] = replace(joined[-1], end=piece.end)
            else:
                joined.append(piece)
        return tuple(joined)

    def shifted(self, count: int) -> Bucket:
        """The same, where so many other items come first."""
        return replace(self, shards=tuple(replace(piece, param=piece.param + count) for piece in self.shards))

    def __str__(self) -> str:
        parts = f"{self.shard_size}" if self.owner is not None else f"parts of {self.shard_size}"
        return f"bucket of {parts}: " + " | ".join(map(str, self.shards))


Stretch = tuple[int, int, int]  # an item, and from where to where


def make_buckets(
    items: Sequence[ParamSpec], ranks: int, sizes: BucketSizes, loads: Sequence[int] = ()
) -> tuple[Bucket, ...]:
    """The buckets of these items. The same items give the same buckets on every rank.

    Args:
        loads: the bytes of other whole items that each rank owns already.
    """
    owners = _owners(items, list(loads) or [0] * ranks)
    ordered = sorted(range(len(items)), key=lambda i: items[i].kind)
    found: list[Bucket] = []
    for kind, members in groupby(ordered, key=lambda i: items[i].kind):
        mine = list(members)
        found += _ranges(kind, [i for i in mine if not items[i].whole], items, ranks, sizes)
        for owner in range(ranks):
            whole = [(i, 0, items[i].count) for i in mine if owners.get(i) == owner]
            found += [_owned(kind, stretches, owner) for stretches in _filled(whole, items, sizes.bucket_nbytes)]
    return tuple(found)


def owned_nbytes(buckets: Iterable[Bucket], items: Sequence[ParamSpec], ranks: int) -> list[int]:
    """The bytes of whole items that each rank owns; frozen ones have no state, and count for nothing."""
    loads = [0] * ranks
    for bucket in buckets:
        for piece in bucket.shards:
            if bucket.owner is not None and not items[piece.param].frozen:
                loads[bucket.owner] += items[piece.param].nbytes
    return loads


def _owners(items: Sequence[ParamSpec], loads: Sequence[int]) -> dict[int, int]:
    """Who owns each whole item: whoever has least, the largest first."""
    owners: dict[int, int] = {}
    for frozen, start in ((False, loads), (True, [0] * len(loads))):
        has = list(start)
        turns = [0] * len(loads)  # what has no elements still takes a place
        for i in sorted((i for i, one in enumerate(items) if one.whole and one.frozen == frozen), key=_size(items)):
            owner = min(range(len(has)), key=lambda rank: (has[rank], turns[rank]))
            has[owner] += items[i].nbytes
            turns[owner] += 1
            owners[i] = owner
    return owners


def _ranges(
    kind: int, members: Sequence[int], items: Sequence[ParamSpec], ranks: int, sizes: BucketSizes
) -> Iterator[Bucket]:
    together: list[Stretch] = []
    for i in members:
        item, begin = items[i], 0
        step = ranks * item.quantum
        alone = -(-min(sizes.single_nbytes, sizes.bucket_nbytes) // item.itemsize)
        while item.count - begin >= max(step, alone):
            count = min(item.count - begin, max(sizes.bucket_nbytes // item.itemsize, step)) // step * step
            yield _equal(kind, [(i, begin, begin + count)], items, ranks, sizes)
            begin += count
        if begin < item.count or not item.count:
            together.append((i, begin, item.count))
    for stretches in _filled(together, items, sizes.bucket_nbytes):
        yield _equal(kind, stretches, items, ranks, sizes)


def _filled(stretches: Iterable[Stretch], items: Sequence[ParamSpec], nbytes: int) -> Iterator[list[Stretch]]:
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


def _equal(
    kind: int, stretches: Sequence[Stretch], items: Sequence[ParamSpec], ranks: int, sizes: BucketSizes
) -> Bucket:
    """One bucket, cut into a part for each rank."""
    quantum = max(items[item].quantum for item, _, _ in stretches)
    # Each stretch begins at a place where one may be cut, so that every cut is at one.
    rooms = [-(-(end - begin) // quantum) * quantum for _, begin, end in stretches]
    part = -(-sum(rooms) // (ranks * quantum)) * quantum
    pieces: list[ShardRange] = []
    at = 0
    for (item, begin, end), room in zip(stretches, rooms, strict=True):
        for piece in _cut(ShardRange(item, begin, end, 0, at), part, ranks):
            pieces += _split(piece, items[item], sizes)
        at += room
    return Bucket(kind, tuple(pieces), part)


def _cut(whole: ShardRange, part: int, ranks: int) -> Iterator[ShardRange]:
    """The pieces of a stretch that lie in the part of each rank; one that is empty lies in one part, too."""
    first = min(whole.offset // part, ranks - 1) if part else 0
    if not whole.count:
        yield replace(whole, rank=first)
        return
    begin, at = whole.begin, whole.offset
    for rank in range(first, ranks):
        end = min(whole.end, begin + (rank + 1) * part - at)
        yield ShardRange(whole.param, begin, end, rank, at)
        at += end - begin
        begin = end
        if begin == whole.end:
            return


def _split(piece: ShardRange, item: ParamSpec, sizes: BucketSizes) -> Iterator[ShardRange]:
    """A piece in equal pieces that are small enough."""
    fitting = (sizes.shard_nbytes or piece.count * item.itemsize) // item.itemsize
    most = max(1, fitting // item.quantum) * item.quantum
    count = max(1, -(-piece.count // most))
    each = -(-piece.count // count // item.quantum) * item.quantum
    for i in range(count):
        begin, end = (min(piece.end, piece.begin + k * each) for k in (i, i + 1))
        if begin < end or not piece.count:
            yield ShardRange(piece.param, begin, end, piece.rank, piece.offset + begin - piece.begin)


def _owned(kind: int, stretches: Sequence[Stretch], owner: int) -> Bucket:
    pieces: list[ShardRange] = []
    at = 0
    for item, begin, end in stretches:
        pieces.append(ShardRange(item, begin, end, owner, at))
        at += end - begin
    return Bucket(kind, tuple(pieces), at, owner)


def _size(items: Sequence[ParamSpec]) -> Callable[[int], int]:
    return lambda i: -items[i].nbytes
