"""The bytes of a step with a set of recomputations, updated as one recomputation is added or removed.

    b from 3 until 9   ->   add(b, before 8)   ->   b from 3 until 5, its last read before 8; and from 8 until 9

Any set of recomputations is a plan, as an op reads the newest version of a value.  So time is a sum, and bytes change
only between the reads of what a recomputation makes and reads.  Negligible storages (see `phase_lp`) are always kept.

A moment is an op of the trace, or a recomputation before one.  Its key is the op's position times `stride`, plus the
index of the producer that is recomputed; for the op itself, plus the highest index.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from functools import cached_property

import numpy as np

from ..ir.decisions import Plan
from ..lp.problem import Ints
from ..schedule.recompute_order import RecomputeOrder
from .phase_lp import PhaseProblem

GROWTH = 1_000  # moments by which the arrays grow


class RerunState:
    """A set of recomputations.

    Attributes:
        keys: of all moments, in order.
        reruns: keys of the recomputations.
        us: the time that they take.
        uses: of each storage: keys of the moments that read it in backward.
        versions: of each storage: key of its last use in forward, then of the recomputations that make it.
        own_nbytes: of each producer: the bytes that it takes while it runs, besides storages.
    """

    def __init__(self, phase_problem: PhaseProblem, budget: int) -> None:
        problem = phase_problem.problem
        self.phase_problem = phase_problem
        self.problem = problem
        self.budget = budget
        self.stride = len(problem.producers) + 1
        self.nbytes = [each.nbytes for each in problem.storages]
        self.producer = [each.producer for each in problem.storages]
        self.us = 0.0
        self.reruns: list[int] = []
        self.keys = [self._key(position) for position in range(problem.size)]
        self.uses = {i: [self._key(use) for use in uses] for i, uses in phase_problem.uses.items()}
        self.versions = {i: [self._key(problem.storages[i].last_forward)] for i in phase_problem.storages}
        self.views = {i: self._view_uses(i) for i in phase_problem.storages}
        self.reads: dict[int, list[int]] = {o: [] for o in phase_problem.producers}
        for i in phase_problem.storages:
            for w in problem.storages[i].readers:
                if w in self.reads:
                    self.reads[w].append(i)
        self.own_nbytes = {o: self._own_nbytes(o) for o in phase_problem.producers}
        # At each moment, beyond the budget: the bytes, and those of them that were there just before it.
        self._nbytes = np.zeros((2, problem.size + GROWTH), dtype=np.int64)
        self._nbytes[0, : problem.size] = problem.captured.total - budget
        self._nbytes[1, : problem.size] = self._crossing() - budget
        self.save()

    @property
    def excess(self) -> Ints:
        """The bytes beyond the budget at every moment; negative where there is room."""
        return self._nbytes[0, : len(self.keys)]

    @property
    def total_excess(self) -> int:
        """The bytes over the budget, summed over the moments."""
        return int(np.add.reduce(np.maximum(self.excess, 0)))

    def with_reruns(self, keys: tuple[int, ...]) -> RerunState:
        """Add recomputations; return this state."""
        for key in keys:
            self.add(key)
        return self

    def has(self, key: int) -> bool:
        """Return True if a recomputation has this key."""
        place = bisect_left(self.reruns, key)
        return place < len(self.reruns) and self.reruns[place] == key

    def add(self, key: int) -> None:
        """Add a recomputation."""
        o = key % self.stride
        self._insert_moment(key, self.own_nbytes[o])
        read = [(i, self.last_use(i, bisect_left(self.versions[i], key) - 1)) for i in self.reads[o]]
        produced = self.phase_problem.producers[o]
        made = [(i, version := bisect_left(self.versions[i], key), self.last_use(i, version - 1)) for i in produced]
        self._register(key)
        for i, last in read:
            self._add_between(last, key, self.nbytes[i])
        for i, version, last in made:
            self._add_between(self.last_use(i, version - 1), last, -self.nbytes[i])
            self._add_from(key, self.last_use(i, version), self.nbytes[i])

    def remove(self, key: int) -> None:
        """Remove a recomputation."""
        o = key % self.stride
        made = [(i, bisect_left(self.versions[i], key)) for i in self.phase_problem.producers[o]]
        lasts = [(self.last_use(i, version - 1), self.last_use(i, version)) for i, version in made]
        read = [
            (i, version := bisect_left(self.versions[i], key) - 1, self.last_use(i, version)) for i in self.reads[o]
        ]
        self._unregister(key)
        for (i, version), (before, last) in zip(made, lasts, strict=True):
            self._add_from(key, last, -self.nbytes[i])
            self._add_between(before, self.last_use(i, version - 1), self.nbytes[i])
        for i, version, last in read:
            self._add_between(self.last_use(i, version), last, -self.nbytes[i])
        self._delete_moment(key)

    def save(self) -> None:
        """Save the bytes of all moments for `restore`."""
        self._saved = self._nbytes[:, : len(self.keys)].copy()

    def restore(self, changes: list[tuple[bool, int]]) -> None:
        """Undo changes (whether it was added, key) since `save`, in half the time of their opposites."""
        for added, key in reversed(changes):
            (self._unregister if added else self._register)(key)
            place = bisect_left(self.keys, key)
            if added:
                del self.keys[place]
            else:
                self.keys.insert(place, key)
        self._nbytes[:, : len(self.keys)] = self._saved

    def last_use(self, i: int, version: int) -> int:
        """Return the key of the last moment that reads a version of a storage."""
        versions, uses = self.versions[i], self.uses[i]
        start = versions[version]
        first = bisect_right(uses, start)
        end = bisect_left(uses, versions[version + 1]) if version + 1 < len(versions) else len(uses)
        if first == end:
            return start
        if views := self.views[i]:
            return max(views.get(use, use) for use in uses[first:end])
        return uses[end - 1]

    def is_read(self, i: int, key: int) -> bool:
        """Return True if a moment reads the version of a storage that a recomputation makes."""
        versions, uses = self.versions[i], self.uses[i]
        version, first = bisect_left(versions, key), bisect_right(uses, key)
        return first < len(uses) and (version + 1 == len(versions) or uses[first] < versions[version + 1])

    def plan(self) -> Plan:
        """Return the decisions."""
        gaps, storages = self.problem.gaps, self.problem.storages
        every = frozenset(gaps.producer)
        reruns = RecomputeOrder(gaps, frozenset(s for s, op in gaps.producer.items() if not gaps.trace.op[op].once))
        recomputed: dict[int, set[str]] = {position: set() for position in gaps.reads}
        for key in self.reruns:
            position, o = divmod(key, self.stride)
            produced = (storages[i].storage for i in self.phase_problem.producers[o])
            recomputed.setdefault(position, set()).update(produced)
        for position, new in sorted(recomputed.items()):
            reruns.drop(every - new)
            reruns.recompute([reruns.whole_value(storage) for storage in sorted(new)], position, frozenset(new))
            reruns.recompute(gaps.reads.get(position, ()), position, frozenset(new))
        return tuple(reruns.decisions)

    def _key(self, position: int) -> int:
        return (position + 1) * self.stride - 1

    def _own_nbytes(self, o: int) -> int:
        op = self.problem.gaps.trace.op[self.problem.producers[o].value]
        return op.workspace + op.nbytes - sum(self.nbytes[i] for i in self.phase_problem.producers[o])

    def _crossing(self) -> Ints:
        change = np.zeros(self.problem.size + 1, dtype=np.int64)
        for life in self.problem.captured.lifetimes:
            # Tangents are there from the first moment of backward on.
            change[life.first + (life.kind != "tangent")] += life.nbytes
            change[life.last + 1] -= life.nbytes
        return np.cumsum(change)[:-1]

    def _view_uses(self, i: int) -> dict[int, int]:
        """Return the last read of each view of a storage that backward makes."""
        storage, ops = self.problem.storages[i].storage, self.problem.gaps.trace.ops
        views = (use for use in self.phase_problem.uses[i] if storage in ops[use].holds)
        return {self._key(use): self._key(self._last_view_reads[use]) for use in views}

    @cached_property
    def _last_view_reads(self) -> dict[int, int]:
        """The last position that reads each backward op, or a view of it."""
        ops, op = self.problem.gaps.trace.ops, self.problem.gaps.trace.op
        last: dict[str, int] = {}
        for position in reversed(range(self.problem.boundary, self.problem.size)):
            viewer = ops[position]
            for read in viewer.reads:
                is_view = not set(op[read].holds).isdisjoint(viewer.holds)
                last[read] = max(last.get(read, 0), last.get(viewer.name, position) if is_view else position)
        return {i: last.get(ops[i].name, i) for i in range(self.problem.boundary, self.problem.size)}

    def _register(self, key: int) -> None:
        """Enter a recomputation in the lists of those that read and make storages."""
        o = key % self.stride
        insort(self.reruns, key)
        self.us += self.problem.producers[o].us
        for i in self.reads[o]:
            insort(self.uses[i], key)
        for i in self.phase_problem.producers[o]:
            insort(self.versions[i], key)

    def _unregister(self, key: int) -> None:
        o = key % self.stride
        del self.reruns[bisect_left(self.reruns, key)]
        self.us -= self.problem.producers[o].us
        for i in self.reads[o]:
            del self.uses[i][bisect_left(self.uses[i], key)]
        for i in self.phase_problem.producers[o]:
            del self.versions[i][bisect_left(self.versions[i], key)]

    def _insert_moment(self, key: int, own: int) -> None:
        """Insert a moment with the bytes that are there before and behind it, and `own` bytes."""
        place, size = bisect_left(self.keys, key), len(self.keys)
        if size == self._nbytes.shape[1]:
            self._nbytes = np.concatenate((self._nbytes, np.zeros((2, GROWTH), dtype=np.int64)), axis=1)
        self._nbytes[:, place + 1 : size + 1] = self._nbytes[:, place:size]
        self._nbytes[0, place] = self._nbytes[1, place] + own
        self.keys.insert(place, key)

    def _delete_moment(self, key: int) -> None:
        place, size = bisect_left(self.keys, key), len(self.keys)
        self._nbytes[:, place : size - 1] = self._nbytes[:, place + 1 : size]
        del self.keys[place]

    def _add_between(self, before: int, last: int, nbytes: int) -> None:
        """Add bytes, which may be negative, after one moment up to another."""
        if before < last:
            lies = self._nbytes[:, bisect_right(self.keys, before) : bisect_right(self.keys, last)]
            lies += nbytes

    def _add_from(self, first: int, last: int, nbytes: int) -> None:
        """Add bytes from the moment on that makes them up to another."""
        begin = bisect_left(self.keys, first)
        lies = self._nbytes[:, begin : bisect_right(self.keys, last)]
        lies += nbytes
        lies[1, 0] -= nbytes
