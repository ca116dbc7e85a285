"""The chain of sections of a step: where forward is narrow, what crosses there, what backward of each section needs.

    a = relu(x)                  section 0: makes a     its backward: g2, which reads a
    ---- a crosses ----
    b = mm(a, w)                 section 1: makes b, c  its backward: g1, which reads b; c is for forward only
    c = add(b, a)
    ---- c crosses ----
    ...
    g1 = relu_backward(d, b)
    g2 = relu_backward(g1, a)

A storage crosses every cut between the op that makes it and the last op, forward or backward of a later section, that
reads it.  So what crosses a later cut and not an earlier one was made between the two, and cuts nest.  A skip
connection only makes the cuts that it crosses wide.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..ir.arrays import Floats, Ints
from ..ir.liveness import lifetimes
from .reuse_gaps import ReuseGaps


@dataclass(frozen=True, eq=False)
class Sections:
    """The sections of a trace, at most `most`.  Arrays have one entry a section."""

    gaps: ReuseGaps
    most: int

    @cached_property
    def producer(self) -> dict[str, int]:
        """Map each storage that may be recomputed to the op (by index) that makes it."""
        once = {storage for op in self.gaps.trace.ops if op.once for storage in op.holds}
        return {storage: self.gaps.trace.index[op] for storage, op in self.gaps.producer.items() if storage not in once}

    @cached_property
    def reads(self) -> dict[int, tuple[str, ...]]:
        """Map each backward op (by index) to the storages that it reads, views of backward included."""
        trace = self.gaps.trace
        backward = range(trace.boundary, len(trace.ops))
        result = {i: trace.held_by(trace.ops[i].reads) for i in backward}
        return {i: tuple(sorted(s for s in storages if s in self.producer)) for i, storages in result.items()}

    @cached_property
    def level(self) -> dict[int, int]:
        """Map each backward op that reads a storage to the forward op (by index) opposite to it, in falling order."""
        reads = {i: storages for i, storages in self.reads.items() if storages}
        return opposite_ops(reads, self.producer, self.gaps.last_forward_use, self.gaps.trace.boundary)

    @cached_property
    def last_use(self) -> dict[str, int]:
        """Map each storage to the last forward op that reads it, or is opposite to a backward op that reads it."""
        result = {storage: self.gaps.last_forward_use[storage] for storage in self.producer}
        for i, level in self.level.items():
            for storage in self.reads[i]:
                result[storage] = max(result[storage], level)
        return result

    @cached_property
    def crossing_nbytes(self) -> Ints:
        """Return the bytes that cross from each forward op to the next.

        Those that backward does not read count twice: they are better made and used within a section.
        """
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

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Return the forward op at which each section begins, from 0, and the number of forward ops."""
        boundary = self.gaps.trace.boundary
        saved = np.zeros(boundary + 2, np.int64)
        for storage in self.saved:
            saved[self.producer[storage] + 1] += self.gaps.trace.nbytes[storage]
        # Cut between the forward ops that are opposite to two backward ops, so that each section has a backward.
        cuts = narrowest_sections(self.crossing_nbytes, sorted(set(self.level.values())))
        return _merged([0, *cuts, boundary], self.crossing_nbytes, np.cumsum(saved), self.most)

    @property
    def count(self) -> int:
        return len(self.cuts) - 1

    def section_of(self, op: int) -> int:
        """Return the section of a forward op."""
        return bisect.bisect_right(self.cuts, op) - 1

    @cached_property
    def extent(self) -> dict[str, tuple[int, int]]:
        """Map each storage to the sections in which it is made, and used last."""
        return {
            storage: (self.section_of(made), self.section_of(self.last_use[storage]))
            for storage, made in self.producer.items()
        }

    @cached_property
    def backward(self) -> tuple[tuple[int, ...], ...]:
        """Return the backward ops of each section that read a storage, in order."""
        result: list[list[int]] = [[] for _ in range(self.count)]
        for i, level in self.level.items():
            result[self.section_of(level)].append(i)
        return tuple(map(tuple, result))

    @cached_property
    def needed(self) -> tuple[frozenset[str], ...]:
        """Return the storages that each section makes and its backward reads."""
        read = ({s for i in ops for s in self.reads[i]} for ops in self.backward)
        return tuple(frozenset(s for s in storages if self.extent[s][0] == j) for j, storages in enumerate(read))

    @cached_property
    def crossing(self) -> tuple[frozenset[str], ...]:
        """Return the storages that are live at the begin of each section."""
        result: list[set[str]] = [set() for _ in range(self.count + 1)]
        for storage, (made, end) in self.extent.items():
            for j in range(made + 1, end + 1):
                result[j].add(storage)
        return tuple(map(frozenset, result))

    @cached_property
    def kept(self) -> tuple[frozenset[str], ...]:
        """Return the storages that a section makes and keeps, so that nothing of it is recomputed."""
        return tuple(
            self.needed[j] | {s for s in self.crossing[j + 1] if self.extent[s][0] == j} for j in range(self.count)
        )

    @cached_property
    def kept_nbytes(self) -> Ints:
        return np.array([sum(self.gaps.trace.nbytes[s] for s in kept) for kept in self.kept], np.int64)

    @cached_property
    def added_nbytes(self) -> Ints:
        """Return [s, k]: the bytes that are live at the begin of section k, and not at that of section s."""
        made_by = np.zeros((self.count + 1, self.count + 1), np.int64)
        for storage, (made, end) in self.extent.items():
            made_by[made + 1, made + 1 : end + 1] += self.gaps.trace.nbytes[storage]
        before = np.cumsum(made_by, axis=0)
        return np.diagonal(before)[None, :] - before

    @cached_property
    def forward_peak(self) -> Ints:
        """Return [s, j]: the peak beside the storages at the begin of section s while forward runs section j."""
        trace = self.gaps.trace
        live = np.zeros((self.count, trace.boundary + 1), np.int64)
        for storage, (made, end) in self.extent.items():
            last = max(self.gaps.last_forward_use[storage], self.cuts[end] - 1)
            live[made, self.producer[storage]] += trace.nbytes[storage]
            live[made, last + 1] -= trace.nbytes[storage]
        live = np.cumsum(np.cumsum(live[::-1], axis=0)[::-1], axis=1)[:, :-1]
        live += np.array([op.workspace for op in trace.ops[: trace.boundary]], np.int64)
        return np.maximum.reduceat(live, self.cuts[:-1], axis=1)

    def own_peak(self, wanted: tuple[frozenset[str], ...]) -> Ints:
        """Return the peak beside the storages at the begin of each section while it makes what is wanted."""
        trace = self.gaps.trace
        live = np.zeros(trace.boundary + 1, np.int64)
        for storage, made in self.producer.items():
            j = self.extent[storage][0]
            last = self.cuts[j + 1] - 1 if storage in wanted[j] else self.gaps.last_forward_use[storage]
            live[made] += trace.nbytes[storage]
            live[min(last + 1, self.cuts[j + 1])] -= trace.nbytes[storage]
        live = np.cumsum(live)[:-1] + np.array([op.workspace for op in trace.ops[: trace.boundary]], np.int64)
        stops = [max((self.producer[s] + 1 for s in wanted[j]), default=cut) for j, cut in enumerate(self.cuts[:-1])]
        return np.array([live[a:b].max(initial=0) for a, b in zip(self.cuts[:-1], stops, strict=True)], np.int64)

    @cached_property
    def fixed(self) -> Ints:
        """Return the bytes at each op that no section moves: inputs, outputs, gradients, ops that run once."""
        trace = self.gaps.trace
        change = np.zeros(len(trace.ops) + 1, np.int64)
        for life in lifetimes(trace):
            if life.storage not in self.producer:
                change[life.first] += life.nbytes
                # Recomputed ops may read at any time what an op makes that runs once.
                change[len(trace.ops) if life.storage in self.gaps.producer else life.last + 1] -= life.nbytes
        return np.cumsum(change)[:-1] + np.array([op.workspace for op in trace.ops], np.int64)

    @cached_property
    def base(self) -> Ints:
        """Return the bytes that no section moves, when backward of each section begins."""
        first = [(ops[0], self.gaps.trace.ops[ops[0]]) for ops in self.backward]
        return np.array([self.fixed[i] - op.nbytes - op.workspace for i, op in first], np.int64)

    @cached_property
    def backward_peak(self) -> Ints:
        """Return [s, t]: the peak beside the storages at the begin of section s while backward of t runs."""
        trace, peak = self.gaps.trace, np.zeros((self.count, self.count), np.int64)
        stop = len(trace.ops)
        for t, ops in enumerate(self.backward):
            last = {storage: i for i in ops for storage in self.reads[i]}
            live = np.zeros((t + 1, stop - ops[0]), np.int64)
            for storage, i in last.items():
                live[self.extent[storage][0], : i - ops[0] + 1] += trace.nbytes[storage]
            live = np.cumsum(live[::-1], axis=0)[::-1] + self.fixed[ops[0] : stop]
            peak[: t + 1, t] = live.max(axis=1)
            stop = ops[0]
        return peak

    def us(self, wanted: tuple[frozenset[str], ...]) -> Floats:
        """Return the time of the ops of each section that make what is wanted."""
        trace, result = self.gaps.trace, np.zeros(self.count)
        for j in range(self.count):
            storages = {s for s in wanted[j] if self.extent[s][0] == j}
            for i in range(self.cuts[j + 1] - 1, self.cuts[j] - 1, -1):
                op = trace.ops[i]
                if any(made.name in storages for made in op.makes):
                    result[j] += op.us
                    storages.update(s for read in op.reads for s in self.gaps.holds.get(read, ()))
        return result


def opposite_ops(
    reads: Mapping[int, Collection[str]], producer: Mapping[str, int], last_use: Mapping[str, int], first: int
) -> dict[int, int]:
    """Map each backward op, by index, to the forward op opposite to it, in falling order.

    That is the earliest last use of a storage that it reads, if forward makes nothing later that is read from here on.

    Args:
        reads: the storages that each backward op reads.
        producer: the forward op that makes a storage.
        last_use: the last forward op that reads it.
        first: the forward op opposite to a first op that reads nothing of forward.
    """
    latest, needed = dict[int, int](), -1
    for i, storages in reversed([*reads.items()]):
        latest[i] = needed = max([needed, *(producer[s] for s in storages if s in producer)])
    result, level = dict[int, int](), first
    for i, storages in reads.items():
        result[i] = level = max(latest[i], min([level, *(last_use[s] for s in storages if s in last_use)]))
    return result


def narrowest_sections(crossing: Ints, marks: Sequence[int]) -> tuple[int, ...]:
    """Return, between each two marks, the op before which the fewest bytes cross."""
    return tuple(a + 1 + int(np.argmin(crossing[a + 1 : b + 1])) for a, b in itertools.pairwise(marks))


def _merged(cuts: list[int], crossing: Ints, saved: Ints, most: int) -> tuple[int, ...]:
    """Drop the cuts that save least, until no more than `most` sections are left.

    A cut saves the smaller of what its two sections keep, less what crosses the cut.
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
