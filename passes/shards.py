"""Divide parameters into buckets, and the elements of each bucket among the ranks.

    w f32[7]  b f32[1]  v f32[4], 2 ranks  ->  shards of 6: w[0:6] to 0 | w[6:7] to 1 | b[0:1] to 1 | v[0:4] to 1

Elements are counted in memory order. A bucket concatenates parameters of one kind (one group, dtype and device, frozen
or not), and rank r of N owns the r-th of N equal shards of it. A long range of one parameter is a bucket of its own,
without padding: it can be sent from the parameter's memory, and received there.

Whole parameters are never cut: each is owned by the rank with the fewest bytes, the largest first, in buckets of one
owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True)
class ParamSpec:
    """A parameter: its elements, their bytes, and its kind."""

    count: int
    itemsize: int
    kind: int
    whole: bool = False  # one rank owns all of it
    frozen: bool = False
    quantum: int = 1  # elements between places where it may be cut

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize


@dataclass(frozen=True)
class BucketSizes:
    """Bytes: the most in a bucket, the least in a bucket of one range, and the most in a shard range (any, if None)."""

    bucket_nbytes: int
    single_nbytes: int
    shard_nbytes: int | None = None


@dataclass(frozen=True)
class ShardRange:
    """Elements [begin, end) of a parameter, their offset in the bucket, and the rank that owns them."""

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
    """Ranges of parameters that are sent together, in order.

    A bucket of N ranks has N times `shard_size` elements, with padding at the end. One of a single owner has
    `shard_size` elements.
    """

    kind: int
    shards: tuple[ShardRange, ...]
    shard_size: int
    owner: int | None = None

    @property
    def params(self) -> tuple[int, ...]:
        """Return the parameters in the bucket, each once."""
        return tuple(dict.fromkeys(shard.param for shard in self.shards))

    def owned_by(self, rank: int) -> tuple[ShardRange, ...]:
        """Return the ranges that a rank owns."""
        return tuple(shard for shard in self.shards if shard.rank == rank)

    def ranges(self, rank: int) -> tuple[ShardRange, ...]:
        """Return the ranges that a rank owns, adjacent ones joined."""
        joined: list[ShardRange] = []
        for shard in self.owned_by(rank):
            if joined and joined[-1].param == shard.param:
                joined[-1] = replace(joined[-1], end=shard.end)
            else:
                joined.append(shard)
        return tuple(joined)

    def shifted(self, count: int) -> Bucket:
        """Return the same bucket, where so many other parameters come first."""
        return replace(self, shards=tuple(replace(shard, param=shard.param + count) for shard in self.shards))

    def __str__(self) -> str:
        size = f"{self.shard_size}" if self.owner is not None else f"shards of {self.shard_size}"
        return f"bucket of {size}: " + " | ".join(map(str, self.shards))


Range = tuple[int, int, int]  # a parameter, begin and end


def make_buckets(
    items: Sequence[ParamSpec], ranks: int, sizes: BucketSizes, loads: Sequence[int] = ()
) -> tuple[Bucket, ...]:
    """Return the buckets of these parameters: the same on every rank, for the same parameters.

    Args:
        loads: the bytes of other whole parameters that each rank owns already.
    """
    owners = _owners(items, list(loads) or [0] * ranks)
    ordered = sorted(range(len(items)), key=lambda i: items[i].kind)
    buckets: list[Bucket] = []
    for kind, members in groupby(ordered, key=lambda i: items[i].kind):
        of_kind = list(members)
        buckets += _ranges(kind, [i for i in of_kind if not items[i].whole], items, ranks, sizes)
        for owner in range(ranks):
            whole = [(i, 0, items[i].count) for i in of_kind if owners.get(i) == owner]
            buckets += [_owned(kind, ranges, owner) for ranges in _filled(whole, items, sizes.bucket_nbytes)]
    return tuple(buckets)


def owned_nbytes(buckets: Iterable[Bucket], items: Sequence[ParamSpec], ranks: int) -> list[int]:
    """Return the bytes of whole parameters that each rank owns. Frozen ones have no state, and do not count."""
    loads = [0] * ranks
    for bucket in buckets:
        for shard in bucket.shards:
            if bucket.owner is not None and not items[shard.param].frozen:
                loads[bucket.owner] += items[shard.param].nbytes
    return loads


def _owners(items: Sequence[ParamSpec], loads: Sequence[int]) -> dict[int, int]:
    """Map each whole parameter to its owner."""
    owners: dict[int, int] = {}
    for frozen, start in ((False, loads), (True, [0] * len(loads))):
        has = list(start)
        turns = [0] * len(loads)  # empty parameters are spread, too
        for i in sorted((i for i, one in enumerate(items) if one.whole and one.frozen == frozen), key=_size(items)):
            owner = min(range(len(has)), key=lambda rank: (has[rank], turns[rank]))
            has[owner] += items[i].nbytes
            turns[owner] += 1
            owners[i] = owner
    return owners


def _ranges(
    kind: int, members: Sequence[int], items: Sequence[ParamSpec], ranks: int, sizes: BucketSizes
) -> Iterator[Bucket]:
    together: list[Range] = []
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
    for ranges in _filled(together, items, sizes.bucket_nbytes):
        yield _equal(kind, ranges, items, ranks, sizes)


def _filled(ranges: Iterable[Range], items: Sequence[ParamSpec], nbytes: int) -> Iterator[list[Range]]:
    """Yield lists of ranges that fit into a bucket together, in order."""
    filled: list[Range] = []
    room = nbytes
    for item, begin, end in ranges:
        range_nbytes = (end - begin) * items[item].itemsize
        if filled and range_nbytes > room:
            yield filled
            filled, room = [], nbytes
        filled.append((item, begin, end))
        room -= range_nbytes
    if filled:
        yield filled


def _equal(kind: int, ranges: Sequence[Range], items: Sequence[ParamSpec], ranks: int, sizes: BucketSizes) -> Bucket:
    """Return one bucket, with a shard for each rank."""
    quantum = max(items[item].quantum for item, _, _ in ranges)
    # Each range begins at a multiple of the quantum, and so does every shard.
    rooms = [-(-(end - begin) // quantum) * quantum for _, begin, end in ranges]
    size = -(-sum(rooms) // (ranks * quantum)) * quantum
    shards: list[ShardRange] = []
    at = 0
    for (item, begin, end), room in zip(ranges, rooms, strict=True):
        for shard in _cut(ShardRange(item, begin, end, 0, at), size, ranks):
            shards += _split(shard, items[item], sizes)
        at += room
    return Bucket(kind, tuple(shards), size)


def _cut(whole: ShardRange, size: int, ranks: int) -> Iterator[ShardRange]:
    """Yield the part of a range in the shard of each rank; an empty range belongs to one rank."""
    first = min(whole.offset // size, ranks - 1) if size else 0
    if not whole.count:
        yield replace(whole, rank=first)
        return
    begin, at = whole.begin, whole.offset
    for rank in range(first, ranks):
        end = min(whole.end, begin + (rank + 1) * size - at)
        yield ShardRange(whole.param, begin, end, rank, at)
        at += end - begin
        begin = end
        if begin == whole.end:
            return


def _split(shard: ShardRange, item: ParamSpec, sizes: BucketSizes) -> Iterator[ShardRange]:
    """Divide a range into equal ones that are small enough."""
    fitting = (sizes.shard_nbytes or shard.count * item.itemsize) // item.itemsize
    most = max(1, fitting // item.quantum) * item.quantum
    count = max(1, -(-shard.count // most))
    each = -(-shard.count // count // item.quantum) * item.quantum
    for i in range(count):
        begin, end = (min(shard.end, shard.begin + k * each) for k in (i, i + 1))
        if begin < end or not shard.count:
            yield ShardRange(shard.param, begin, end, shard.rank, shard.offset + begin - shard.begin)


def _owned(kind: int, ranges: Sequence[Range], owner: int) -> Bucket:
    shards: list[ShardRange] = []
    at = 0
    for item, begin, end in ranges:
        shards.append(ShardRange(item, begin, end, owner, at))
        at += end - begin
    return Bucket(kind, tuple(shards), at, owner)


def _size(items: Sequence[ParamSpec]) -> Callable[[int], int]:
    return lambda i: -items[i].nbytes
