"""Simulate torch's caching allocator on a CUDA device, to know how much it would hold for a step.

    held(forecast)   ->   Held(live=75.5 MB, given=75.5 MB, reserved=100.6 MB)

It learns of requests one by one, and never moves a block. So it holds more than is live at once: free blocks that are
too small for the next request, and blocks that are a little larger than what was asked for.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.11, with its default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .arena import ALIGNMENT, Slot, allocated
from .forecast import Forecast

SMALL = 1 << 20  # up to that, requests share small segments; a block's rest up to that is given out with it
SMALL_SEGMENT, SEGMENT = 2 << 20, 20 << 20
LARGE = 10 << 20  # from that on, a request has a segment of its own size


class Held(NamedTuple):
    """Bytes that are requested at once, that blocks for these have, and that the allocator holds of the device."""

    live: int
    given: int
    reserved: int


class Block(NamedTuple):
    """A part of a segment, and its end."""

    segment: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def held(forecast: Forecast, expandable: bool = False) -> Held:
    """Return what the allocator holds for what a step allocates, with or without expandable segments."""
    return simulated(allocated(forecast, ALIGNMENT), expandable)


def simulated(slots: Sequence[Slot], expandable: bool = False) -> Held:
    """Return what it holds for storages with these lifetimes."""
    pools = {is_small: Pool(is_small, expandable) for is_small in (True, False)}
    begins, ends = defaultdict(list), defaultdict(list)
    for slot in slots:
        begins[slot.first].append(slot)
        ends[slot.last + 1].append(slot)
    blocks: dict[Slot, Block] = {}
    live = given = most_live = most_given = 0
    for op in sorted({*begins, *ends}):
        for slot in ends[op]:
            block = blocks.pop(slot)
            pools[slot.nbytes <= SMALL].release(block)
            live, given = live - slot.nbytes, given - block.nbytes
        for slot in begins[op]:
            block = blocks[slot] = pools[slot.nbytes <= SMALL].take(slot.nbytes)
            live, given = live + slot.nbytes, given + block.nbytes
        most_live, most_given = max(most_live, live), max(most_given, given)
    return Held(most_live, most_given, sum(sum(pool.segments) for pool in pools.values()))


@dataclass
class Pool:
    """The segments for small or for large requests, and their free blocks, the smallest first."""

    is_small: bool
    expandable: bool
    segments: list[int] = field(default_factory=list)
    free: list[tuple[int, Block]] = field(default_factory=list)
    by_begin: dict[tuple[int, int], Block] = field(default_factory=dict)
    by_end: dict[tuple[int, int], Block] = field(default_factory=dict)

    @classmethod
    def of(cls, nbytes: int) -> Pool:
        """Return a pool for large requests with one segment, which is free."""
        pool = cls(False, False, [nbytes])
        pool.release(Block(0, 0, nbytes))
        return pool

    def copy(self) -> Pool:
        """Return a pool in the same state."""
        lists, indexes = ([*self.segments], [*self.free]), (dict(self.by_begin), dict(self.by_end))
        return Pool(self.is_small, self.expandable, *lists, *indexes)

    def smallest(self, nbytes: int) -> Block | None:
        """Return the smallest free block that is large enough, the one that a request for so much begins in."""
        i = bisect_left(self.free, (nbytes,))
        return self.free[i][1] if i < len(self.free) else None

    def take(self, nbytes: int) -> Block:
        """Return the smallest free block that is large enough, or a part of it."""
        block = self.smallest(nbytes)
        if block is None:
            self._grow(nbytes)
            block = self.smallest(nbytes)
            assert block is not None
        self._forget(block)
        rest = block.nbytes - nbytes
        if rest > (SMALL if not self.is_small and not self.expandable else 0):
            self.release(Block(block.segment, block.begin + nbytes, block.end))
            return block._replace(end=block.begin + nbytes)
        return block

    def release(self, block: Block) -> None:
        """Free a block, and join it with the free ones beside it."""
        segment, begin, end = block
        if (before := self.by_end.get((segment, begin))) is not None:
            self._forget(before)
            begin = before.begin
        if (behind := self.by_begin.get((segment, end))) is not None:
            self._forget(behind)
            end = behind.end
        joined = Block(segment, begin, end)
        insort(self.free, (joined.nbytes, joined))
        self.by_begin[segment, begin] = self.by_end[segment, end] = joined

    def _grow(self, nbytes: int) -> None:
        """Take a segment from the device; an expandable one grows at its end, where it may have a free block."""
        page = SMALL_SEGMENT if self.is_small else SEGMENT
        if not self.expandable:
            self.segments.append(page if nbytes < LARGE else whole_segment(nbytes))
            self.release(Block(len(self.segments) - 1, 0, self.segments[-1]))
            return
        end = self.segments[0] if self.segments else 0
        last = self.by_end.get((0, end))
        more = _up(nbytes - (last.nbytes if last else 0), page)
        self.segments = [end + more]
        self.release(Block(0, end, end + more))

    def _forget(self, block: Block) -> None:
        self.free.pop(bisect_left(self.free, (block.nbytes, block)))
        del self.by_begin[block.segment, block.begin], self.by_end[block.segment, block.end]


def whole_segment(nbytes: int) -> int:
    """Return the bytes of a segment for so large a request: whole pages of the device."""
    return _up(nbytes, SMALL_SEGMENT)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
