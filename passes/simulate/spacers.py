"""Let torch's caching allocator give out the addresses of an arena, with blocks that keep it from other places.

    free: 0 to 8 MB, 20 to 40 MB                        spacers are allocated: 0 to 8 MB, 20 to 30 MB
    the next op asks for 8 MB, at 30 MB in the arena    the op gets 30 to 38 MB
                                                   ->   the spacers are freed

The allocator gives out the beginning of the smallest free block that is large enough.  So what it will do is known, if
all requests of a step are.  Spacers are allocated before an op and freed behind it, and their bytes are not used.
Where the requests of a run differ from those that are known, an op gets another address, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from .arena import Arena, Slot, place
from .caching_allocator import SMALL, Block, Pool, whole_segment

SEEDS, ROUNDS = 12, 60  # placements that are tried, and the rounds of each one's search: at most,
WORK = 20_000  # and at most as many as this is over the number of requests, but two
ENOUGH = 1.005  # of what is live at once may be held
TRIES = 32  # places that are blocked for one op
MOVES = 16  # requests of one op that get another place


class Event(NamedTuple):
    """A request of an op for so many bytes, or the end of one (0 bytes), in the order in which the allocator sees them.

    Bytes are multiples of the allocator's unit; requests are numbered.
    """

    op: int
    request: int
    nbytes: int


class Span(NamedTuple):
    """A part of the block."""

    begin: int
    end: int


class Spacer(NamedTuple):
    """A block that is allocated before an op. If not `kept`, it is freed again before the op, to leave a gap."""

    nbytes: int
    kept: bool


@dataclass(frozen=True)
class Guide:
    """The spacers of a step.

    Attributes:
        block: bytes of the one block that the allocator has when the step begins.
        spacers: by op, for ops that have some.
        live, reserved: the most bytes that large requests have at once, and what the allocator holds for them.
        given: the most bytes of blocks at once while an op runs, spacers included.
        missed: requests that get another address than in the arena.
    """

    block: int
    spacers: Mapping[int, tuple[Spacer, ...]]
    live: int
    reserved: int
    given: int
    missed: int


def guide(events: Sequence[Event], limit: int | None = None) -> Guide:
    """Return the spacers for a step with these requests; no more than `limit` bytes are to be given out at once.

    Requests that share small segments are left out.
    """
    large = _large(events)
    slots = _slots(large)
    best: Guide | None = None
    tries = max(2, WORK // max(1, len(slots)))
    for seed in range(min(SEEDS, tries)):
        found = _with_places(large, place(slots, min(ROUNDS, tries), seed), limit)
        if best is None or found.reserved < best.reserved:
            best = found
        if best.reserved <= whole_segment(int(best.live * ENOUGH)):
            break
    assert best is not None
    return best


def _with_places(events: Sequence[Event], arena: Arena, limit: int | None) -> Guide:
    """Return the spacers that bring requests to their places in an arena."""
    block = whole_segment(arena.nbytes)
    places = _Places(arena.slots)
    now = _State(Pool.of(block), {})
    spacers: dict[int, tuple[Spacer, ...]] = {}
    missed = given = 0
    for op, group in groupby(events, lambda event: event.op):
        ran = _guided(now, list(group), places, limit)
        if ran.spacers:
            spacers[op] = ran.spacers
        now, missed, given = ran.end, missed + ran.missed, max(given, ran.most)
    return Guide(block, spacers, arena.live, sum(now.pool.segments), given, missed)


def _large(events: Iterable[Event]) -> list[Event]:
    """Return the events of large requests."""
    large = {event.request for event in events if event.nbytes > SMALL}
    return [event for event in events if event.request in large]


def _slots(events: Sequence[Event]) -> list[Slot]:
    """Return the lifetimes of requests, counted in events; the name of a slot is the request's number."""
    end = {event.request: at for at, event in enumerate(events) if not event.nbytes}
    return [
        Slot(str(event.request), event.nbytes, at, end.get(event.request, len(events)) - 1)
        for at, event in enumerate(events)
        if event.nbytes
    ]


@dataclass(frozen=True)
class _State:
    """The allocator between two ops, and the blocks of requests."""

    pool: Pool
    blocks: Mapping[int, Block]


@dataclass(frozen=True)
class _Ran:
    """An op that ran behind some spacers.

    Attributes:
        wrong: the first request that gets another place than it should, and the free block that it is in; None if there
            is none.
        most: the most bytes given out at once.
    """

    spacers: tuple[Spacer, ...]
    end: _State
    wrong: tuple[int, Block | None] | None
    missed: int
    most: int


class _Places:
    """The places of all requests: those of the arena, and others for some that the allocator can't be brought to."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.row = {int(slot.name): i for i, slot in enumerate(slots)}
        facts = [(slot.first, slot.last, slot.address, slot.end) for slot in slots]
        self.first, self.last, self.begin, self.end = np.array(facts, dtype=np.int64).reshape(-1, 4).T.copy()

    def of(self, asked: Sequence[Event]) -> dict[int, Span]:
        """Return the places of an op's requests."""
        rows = {event.request: self.row[event.request] for event in asked if event.nbytes}
        return {request: Span(int(self.begin[row]), int(self.end[row])) for request, row in rows.items()}

    def other(self, request: int, free: Sequence[Span], tried: Container[tuple[int, int]]) -> Span | None:
        """Return another place for a request, at an end of a free block: where the least is to be in its lifetime."""
        row = self.row[request]
        nbytes = self.end[row] - self.begin[row]
        later = (self.first > self.first[row]) & (self.first <= self.last[row])
        begins = {int(at) for each in free for at in (each.begin, each.end - nbytes) if at >= each.begin}
        found = [at for at in begins if (request, at) not in tried]
        begin = min(found, key=lambda at: self._met(later, at, at + nbytes), default=None)
        return None if begin is None else Span(begin, begin + int(nbytes))

    def put(self, request: int, place: Span) -> None:
        """Give a request this place."""
        self.begin[self.row[request]], self.end[self.row[request]] = place

    def _met(self, rows: Any, begin: int, end: int) -> int:
        common = np.minimum(self.end, end) - np.maximum(self.begin, begin)
        return int(common[rows & (common > 0)].sum())


def _guided(now: _State, asked: Sequence[Event], places: _Places, limit: int | None) -> _Ran:
    """Return an op that ran behind the spacers that it takes; without any where these can't be found."""
    free = [Span(block.begin, block.end) for nbytes, block in now.pool.free if nbytes > SMALL]
    natural = _ran(now, asked, (), places.of(asked))
    tried = {(request, place.begin) for request, place in places.of(asked).items()}
    for _ in range(MOVES):
        ran = _spaced(now, asked, places.of(asked), free)
        if ran.wrong is None:
            return ran if limit is None or ran.most <= limit else natural
        for request in (ran.wrong[0], *places.of(asked)):
            place = places.other(request, free, tried)
            if place is not None:
                tried.add((request, place.begin))
                places.put(request, place)
                break
        else:
            break
    return natural


def _spaced(now: _State, asked: Sequence[Event], at: Mapping[int, Span], free: Sequence[Span]) -> _Ran:
    """Return an op that ran behind the spacers that it takes; something is wrong if these can't be found."""
    ran = _ran(now, asked, (), at)
    blocked: list[Span] = []
    for _ in range(TRIES):
        if ran.wrong is None:
            return _fewest(now, asked, at, ran)
        more = _to_block(*ran.wrong, free, at, blocked)
        if not more:
            break
        blocked += more
        ran = _ran(now, asked, tuple(_spacers(free, blocked)), at)
    return ran


def _fewest(now: _State, asked: Sequence[Event], at: Mapping[int, Span], ran: _Ran) -> _Ran:
    """Return the op without spacers that change nothing."""
    for i in reversed(range(len(ran.spacers))):
        fewer = _ran(now, asked, ran.spacers[:i] + ran.spacers[i + 1 :], at)
        ran = fewer if fewer.wrong is None else ran
    return ran


def _to_block(
    request: int, taken: Block | None, free: Sequence[Span], at: Mapping[int, Span], blocked: Sequence[Span]
) -> list[Span]:
    """Return the free parts to block, so that a request is not in the block `taken`, but in its place."""
    wanted = at[request]
    region = next((each for each in free if each.begin <= wanted.begin and wanted.end <= each.end), None)
    if region is None or taken is None:
        return []
    place = Span(taken.begin, wanted.begin if taken.begin < wanted.begin < taken.end else taken.end)
    for around in (place, region):
        parts = [part for each in free for part in _without([_common(around, each)], [*at.values(), *blocked])]
        if parts:
            return parts
    return []


def _common(one: Span, other: Span) -> Span:
    return Span(max(one.begin, other.begin), min(one.end, other.end))


def _without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return what is left of spans without others."""
    left = [span for span in spans if span.begin < span.end]
    for other in others:
        parts = [
            (Span(each.begin, min(each.end, other.begin)), Span(max(each.begin, other.end), each.end)) for each in left
        ]
        left = [part for both in parts for part in both if part.begin < part.end]
    return left


def _spacers(free: Sequence[Span], blocked: Sequence[Span]) -> Iterator[Spacer]:
    """Yield the spacers that take these parts of free blocks, which come smallest first.

    When a free block is divided, all smaller ones are taken, so that the allocator has no other choice.
    """
    last = max((i for i, each in enumerate(free) if _inside(each, blocked)), default=-1)
    for each in free[: last + 1]:
        begin = each.begin
        for part in _joined(_inside(each, blocked), each.begin):
            if begin < part.begin:
                yield Spacer(part.begin - begin, False)
            yield Spacer(part.end - part.begin, True)
            begin = part.end
        if each.end - begin > SMALL and each is not free[last]:
            yield Spacer(each.end - begin, False)


def _joined(parts: Iterable[Span], begin: int) -> list[Span]:
    """Return parts that the pool of large requests has room for: with the little that is between them, if it is little.

    What is too small is left out.
    """
    joined: list[Span] = []
    for part in sorted(parts):
        before = joined[-1].end if joined else begin
        if part.begin - before > SMALL:
            joined.append(part)
        elif joined:
            joined[-1] = Span(joined[-1].begin, part.end)
        else:
            joined.append(Span(begin, part.end))
    return [part for part in joined if part.end - part.begin > SMALL]


def _inside(span: Span, others: Iterable[Span]) -> list[Span]:
    return [other for other in others if span.begin <= other.begin and other.end <= span.end]


def _ran(now: _State, asked: Sequence[Event], spacers: Sequence[Spacer], at: Mapping[int, Span]) -> _Ran:
    """Simulate an op behind these spacers."""
    pool, blocks = now.pool.copy(), dict(now.blocks)
    taken = [pool.take(spacer.nbytes) for spacer in spacers]
    for block, spacer in zip(taken, spacers, strict=True):
        if not spacer.kept:
            pool.release(block)
    held = [block for block, spacer in zip(taken, spacers, strict=True) if spacer.kept]
    given = most = sum(block.nbytes for block in (*blocks.values(), *held))
    ended = {event.request for event in asked if not event.nbytes}
    wrong: tuple[int, Block | None] | None = None
    missed = 0
    for event in asked:
        if not event.nbytes:
            block = blocks.pop(event.request)
            pool.release(block)
            given -= block.nbytes
            continue
        free, wanted = pool.smallest(event.nbytes), at[event.request]
        block = blocks[event.request] = pool.take(event.nbytes)
        if free is None or not 0 <= wanted.begin - block.begin <= SMALL:
            others = (span for request, span in at.items() if request != event.request)
            harmless = free is not None and event.request in ended and not any(_meet(block, span) for span in others)
            wrong = wrong if wrong or harmless else (event.request, free)
            missed += not harmless
        given += block.nbytes
        most = max(most, given)
    for block in held:
        pool.release(block)
    return _Ran(tuple(spacers), _State(pool, blocks), wrong, missed, most)


def _meet(block: Block, span: Span) -> bool:
    return block.begin < span.end and span.begin < block.end
