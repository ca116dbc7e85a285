"""Find where forward is narrow: the places between ops at which few bytes wait for later ops.

    a = relu(x)                  slice 0 makes a; its backward is g2, which reads a
    ---- a crosses ----
    b = mm(a, w)                 slice 1 makes b and c; its backward is g1, which reads b
    c = add(b, a)
    ---- c crosses ----
    ...
    g1 = relu_backward(d, b)
    g2 = relu_backward(g1, a)

A storage crosses every cut between the op that makes it and the last op, forward or backward of a later slice, that
reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..ir.arrays import Ints
from .reuse_gaps import ReuseGaps


@dataclass(frozen=True, eq=False)
class Slices:
    """The bytes that cross each place of forward."""

    gaps: ReuseGaps

    @cached_property
    def producer(self) -> dict[str, int]:
        """Return the op (by index) that makes each storage that may be recomputed."""
        once = {storage for op in self.gaps.trace.ops if op.once for storage in op.holds}
        return {storage: self.gaps.index[op] for storage, op in self.gaps.producer.items() if storage not in once}

    @cached_property
    def reads(self) -> dict[int, tuple[str, ...]]:
        """For each backward op (by index) the storages that it reads, through views that backward makes as well."""
        trace = self.gaps.trace
        backward = range(trace.boundary, len(trace.ops))
        found = {i: {s for read in trace.ops[i].reads for s in trace.op[read].holds} for i in backward}
        return {i: tuple(sorted(s for s in storages if s in self.producer)) for i, storages in found.items()}

    @cached_property
    def latest(self) -> dict[int, int]:
        """For each backward op that reads a storage the forward op that makes the latest of what is read from here on.

        Backward of a slice does not begin before all of these have been used."""
        found: dict[int, int] = {}
        latest = -1
        for i, storages in reversed(self.reads.items()):
            latest = max([latest, *(self.producer[storage] for storage in storages)])
            if storages:
                found[i] = latest
        return dict(reversed(found.items()))

    @cached_property
    def level(self) -> dict[int, int]:
        """For each backward op that reads a storage the forward op (by index) opposite to it; they fall.

        It is the op that was the first to be done with one of what is read, if nothing later is needed from here on.
        """
        found: dict[int, int] = {}
        level = self.gaps.trace.boundary
        for i, latest in self.latest.items():
            done = min(self.gaps.last_forward_use[storage] for storage in self.reads[i])
            found[i] = level = max(latest, min(level, done))
        return found

    @cached_property
    def last_use(self) -> dict[str, int]:
        """The last forward op that reads each storage or stands opposite to a backward op that reads it."""
        found = {storage: self.gaps.last_forward_use[storage] for storage in self.producer}
        for i, level in self.level.items():
            for storage in self.reads[i]:
                found[storage] = max(found[storage], level)
        return found

    @cached_property
    def crossing_nbytes(self) -> Ints:
        """The bytes that lie between each forward op and the one before it, those twice that backward does not read:
        they are better made and used up within a slice."""
        change = np.zeros(self.gaps.trace.boundary + 2, np.int64)
        for storage, made in self.producer.items():
            nbytes = self.gaps.trace.nbytes[storage] * (1 if storage in self.saved else 2)
            change[made + 1] += nbytes
            change[self.last_use[storage] + 1] -= nbytes
        return np.cumsum(change)

    @cached_property
    def saved(self) -> frozenset[str]:
        """Return the storages that backward reads."""
        return frozenset(storage for storages in self.reads.values() for storage in storages)


def narrowest_slices(crossing: Ints, marks: Sequence[int]) -> tuple[int, ...]:
    """Return, between each two marks, the op before which the fewest bytes cross."""
    return tuple(a + 1 + int(np.argmin(crossing[a + 1 : b + 1])) for a, b in itertools.pairwise(marks))
