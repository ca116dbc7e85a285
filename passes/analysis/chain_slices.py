"""The chain of slices of a step: where forward is narrow, what lies there, and what backward of each slice needs.

    a = relu(x)                  slice 0: makes a     its backward: g2, which reads a
    ---- a crosses ----
    b = mm(a, w)                 slice 1: makes b, c  its backward: g1, which reads b; c is for forward only
    c = add(b, a)
    ---- c crosses ----
    ...
    g1 = relu_backward(d, b)
    g2 = relu_backward(g1, a)

A storage crosses every cut between the op that makes it and the last op, forward or backward of a later slice, that
reads it.  So what lies at a later cut and not at an earlier one was made between the two, and cuts nest: a skip
connection is no exception, it only makes the cuts below it wide.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..ir.liveness import lifetimes
from .reuse_gaps import ReuseGaps

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Slices:
    """The slices of a trace, at most `most`; arrays have one entry a slice, and bytes are exact."""

    gaps: ReuseGaps
    most: int

    @cached_property
    def producer(self) -> dict[str, int]:
        """The op (by index) that makes each storage that may be made again."""
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
        """The storages that backward reads."""
        return frozenset(storage for storages in self.reads.values() for storage in storages)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The forward op at which each slice begins; first 0, last the number of forward ops."""
        boundary = self.gaps.trace.boundary
        saved = np.zeros(boundary + 2, np.int64)
        for storage in self.saved:
            saved[self.producer[storage] + 1] += self.gaps.trace.nbytes[storage]
        # Each slice has a backward, and is cut between the ops that are opposite to two of them.
        cuts = narrowest_slices(self.crossing_nbytes, sorted(set(self.level.values())))
        return _merged([0, *cuts, boundary], self.crossing_nbytes, np.cumsum(saved), self.most)

    @property
    def count(self) -> int:
        return len(self.cuts) - 1

    def slice_of(self, op: int) -> int:
        """The slice of a forward op."""
        return bisect.bisect_right(self.cuts, op) - 1

    @cached_property
    def extent(self) -> dict[str, tuple[int, int]]:
        """The slices in which each storage is made and has its end."""
        return {
            storage: (self.slice_of(made), self.slice_of(self.last_use[storage]))
            for storage, made in self.producer.items()
        }

    @cached_property
    def backward(self) -> tuple[tuple[int, ...], ...]:
        """The backward ops of each slice that read a storage, in order."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for i, level in self.level.items():
            found[self.slice_of(level)].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def needed(self) -> tuple[frozenset[str], ...]:
        """The storages that backward of each slice reads and the slice itself makes."""
        read = ({s for i in ops for s in self.reads[i]} for ops in self.backward)
        return tuple(frozenset(s for s in storages if self.extent[s][0] == j) for j, storages in enumerate(read))

    @cached_property
    def crossing(self) -> tuple[frozenset[str], ...]:
        """The storages that lie at the beginning of each slice."""
        found: list[set[str]] = [set() for _ in range(self.count + 1)]
        for storage, (made, end) in self.extent.items():
            for j in range(made + 1, end + 1):
                found[j].add(storage)
        return tuple(map(frozenset, found))

    @cached_property
    def kept(self) -> tuple[frozenset[str], ...]:
        """What a slice makes and keeps, so that nothing of it has to be run again."""
        return tuple(
            self.needed[j] | {s for s in self.crossing[j + 1] if self.extent[s][0] == j} for j in range(self.count)
        )

    @cached_property
    def kept_nbytes(self) -> Ints:
        return np.array([sum(self.gaps.trace.nbytes[s] for s in kept) for kept in self.kept], np.int64)

    @cached_property
    def added_nbytes(self) -> Ints:
        """[s, k]: the bytes that lie at the beginning of slice k and not yet at that of slice s."""
        made_by = np.zeros((self.count + 1, self.count + 1), np.int64)
        for storage, (made, end) in self.extent.items():
            made_by[made + 1, made + 1 : end + 1] += self.gaps.trace.nbytes[storage]
        before = np.cumsum(made_by, axis=0)
        return np.diagonal(before)[None, :] - before

    @cached_property
    def forward_peak(self) -> Ints:
        """[s, j]: the most that lies there beside the beginning of slice s while forward runs through slice j."""
        trace = self.gaps.trace
        alive = np.zeros((self.count, trace.boundary + 1), np.int64)
        for storage, (made, end) in self.extent.items():
            last = max(self.gaps.last_forward_use[storage], self.cuts[end] - 1)
            alive[made, self.producer[storage]] += trace.nbytes[storage]
            alive[made, last + 1] -= trace.nbytes[storage]
        alive = np.cumsum(np.cumsum(alive[::-1], axis=0)[::-1], axis=1)[:, :-1]
        alive += np.array([op.workspace for op in trace.ops[: trace.boundary]], np.int64)
        return np.maximum.reduceat(alive, self.cuts[:-1], axis=1)

    def own_peak(self, wanted: tuple[frozenset[str], ...]) -> Ints:
        """The most that lies there beside the beginning of a slice while it makes what is wanted of it."""
        trace = self.gaps.trace
        alive = np.zeros(trace.boundary + 1, np.int64)
        for storage, made in self.producer.items():
            j = self.extent[storage][0]
            last = self.cuts[j + 1] - 1 if storage in wanted[j] else self.gaps.last_forward_use[storage]
            alive[made] += trace.nbytes[storage]
            alive[min(last + 1, self.cuts[j + 1])] -= trace.nbytes[storage]
        alive = np.cumsum(alive)[:-1] + np.array([op.workspace for op in trace.ops[: trace.boundary]], np.int64)
        stops = [max((self.producer[s] + 1 for s in wanted[j]), default=cut) for j, cut in enumerate(self.cuts[:-1])]
        return np.array([alive[a:b].max(initial=0) for a, b in zip(self.cuts[:-1], stops, strict=True)], np.int64)

    @cached_property
    def fixed(self) -> Ints:
        """The bytes at each op that no slice moves: inputs, outputs, gradients, what may be made only once."""
        trace = self.gaps.trace
        change = np.zeros(len(trace.ops) + 1, np.int64)
        for life in lifetimes(trace):
            if life.storage not in self.producer:
                change[life.first] += life.nbytes
                # What may be made only once can be read again at any time, by what is made of it again.
                change[len(trace.ops) if life.storage in self.gaps.producer else life.last + 1] -= life.nbytes
        return np.cumsum(change)[:-1] + np.array([op.workspace for op in trace.ops], np.int64)

    @cached_property
    def base(self) -> Ints:
        """What no slice moves and lies there when backward of a slice begins."""
        first = [(ops[0], self.gaps.trace.ops[ops[0]]) for ops in self.backward]
        return np.array([self.fixed[i] - op.nbytes - op.workspace for i, op in first], np.int64)

    @cached_property
    def backward_peak(self) -> Ints:
        """[s, t]: the most that lies there beside the beginning of slice s while backward of t runs."""
        trace, peak = self.gaps.trace, np.zeros((self.count, self.count), np.int64)
        stop = len(trace.ops)
        for t, ops in enumerate(self.backward):
            last = {storage: i for i in ops for storage in self.reads[i]}
            alive = np.zeros((t + 1, stop - ops[0]), np.int64)
            for storage, i in last.items():
                alive[self.extent[storage][0], : i - ops[0] + 1] += trace.nbytes[storage]
            alive = np.cumsum(alive[::-1], axis=0)[::-1] + self.fixed[ops[0] : stop]
            peak[: t + 1, t] = alive.max(axis=1)
            stop = ops[0]
        return peak

    def us(self, wanted: tuple[frozenset[str], ...]) -> Floats:
        """The time of each slice's ops that have to run to make what is wanted of it."""
        trace, found = self.gaps.trace, np.zeros(self.count)
        for j in range(self.count):
            storages = {s for s in wanted[j] if self.extent[s][0] == j}
            for i in range(self.cuts[j + 1] - 1, self.cuts[j] - 1, -1):
                op = trace.ops[i]
                if any(made.name in storages for made in op.makes):
                    found[j] += op.us
                    storages.update(s for read in op.reads for s in self.gaps.holds.get(read, ()))
        return found


def narrowest_slices(crossing: Ints, marks: Sequence[int]) -> tuple[int, ...]:
    """Between each two marks the op before which least crosses."""
    return tuple(a + 1 + int(np.argmin(crossing[a + 1 : b + 1])) for a, b in itertools.pairwise(marks))


def _merged(cuts: list[int], crossing: Ints, saved: Ints, most: int) -> tuple[int, ...]:
    """The cuts that remain when those that save least are given up, until no more than `most` slices are left.

    A cut saves the smaller of what its two slices keep, less what lies at the cut itself.
    """
    width, sizes = crossing[cuts], np.diff(saved[cuts])
    while len(sizes) > max(1, most):
        gain = np.minimum(sizes[:-1], sizes[1:]) - width[1:-1]
        at = int(np.argmin(gain))
        del cuts[at + 1]
        width = np.delete(width, at + 1)
        sizes[at] += sizes[at + 1]
        sizes = np.delete(sizes, at + 1)
    return tuple(cuts)
