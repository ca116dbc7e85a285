"""What lies on the device at each moment of a step in which ops run again, kept up to date as one re-run comes or goes.

    b from 3 until 9   ->   add(b, before 8)   ->   b from 3 until 5, its last read before 8; again from 8 until 9

A moment is an op of the trace, or a re-run before one: its key is the op's position times `stride`, plus the index of
the maker that runs again, or the highest of all for the op itself.  Any set of re-runs is a plan: who reads a value
reads what was made of it last.  So time is a sum, and bytes change only between the reads of what a re-run makes and
reads.  Crumbs (see `phases`) are there throughout.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from functools import cached_property

import numpy as np

from ..ir.decisions import Plan
from ..lp.problem import Ints
from ..schedule.recompute_order import RecomputeOrder
from .phase_lp import Pieces

GROWTH = 1_000  # moments for which there is room at first beside the ops


class RerunState:
    """`keys` of all moments in their order, `runs` those of re-runs; `us`: what these take.

    Of each item: `uses`, the keys of those that read it in backward, and `made`, the key of its last use in forward
    and those of the re-runs that make it.
    """

    def __init__(self, pieces: Pieces, budget: int) -> None:
        program = pieces.program
        self.pieces = pieces
        self.program = program
        self.budget = budget
        self.stride = len(program.producers) + 1
        self.nbytes = [item.nbytes for item in program.storages]
        self.maker = [item.producer for item in program.storages]
        self.us = 0.0
        self.runs: list[int] = []
        self.keys = [self._key(position) for position in range(program.size)]
        self.uses = {i: [self._key(use) for use in uses] for i, uses in pieces.uses.items()}
        self.made = {i: [self._key(program.storages[i].last_forward)] for i in pieces.items}
        self.views = {i: self._views(i) for i in pieces.items}
        self.reads: dict[int, list[int]] = {o: [] for o in pieces.made}
        for i in pieces.items:
            for w in program.storages[i].readers:
                if w in self.reads:
                    self.reads[w].append(i)
        # What a maker takes while it runs beside the items.
        self.own = {o: self._own(o) for o in pieces.made}
        # At each moment what lies there beyond the budget, and what lay there just before it and still does.
        self._lies = np.zeros((2, program.size + GROWTH), dtype=np.int64)
        self._lies[0, : program.size] = program.captured.total - budget
        self._lies[1, : program.size] = self._crossing() - budget
        self.keep()

    @property
    def beyond(self) -> Ints:
        """The bytes beyond the budget at every moment; below 0 where there is room."""
        return self._lies[0, : len(self.keys)]

    @property
    def over(self) -> int:
        """The bytes over the budget, summed over all moments."""
        return int(np.add.reduce(np.maximum(self.beyond, 0)))

    def with_runs(self, keys: tuple[int, ...]) -> RerunState:
        """The same with more re-runs."""
        for key in keys:
            self.add(key)
        return self

    def has(self, key: int) -> bool:
        """Whether a re-run has this key."""
        place = bisect_left(self.runs, key)
        return place < len(self.runs) and self.runs[place] == key

    def add(self, key: int) -> None:
        """One more re-run."""
        o = key % self.stride
        self._insert(key, self.own[o])
        read = [(i, self.last(i, bisect_left(self.made[i], key) - 1)) for i in self.reads[o]]
        made = [(i, version := bisect_left(self.made[i], key), self.last(i, version - 1)) for i in self.pieces.made[o]]
        self._enter(key)
        for i, last in read:
            self._change(last, key, self.nbytes[i])
        for i, version, last in made:
            self._change(self.last(i, version - 1), last, -self.nbytes[i])
            self._live(key, self.last(i, version), self.nbytes[i])

    def remove(self, key: int) -> None:
        """One less."""
        o = key % self.stride
        made = [(i, bisect_left(self.made[i], key)) for i in self.pieces.made[o]]
        lasts = [(self.last(i, version - 1), self.last(i, version)) for i, version in made]
        read = [(i, version := bisect_left(self.made[i], key) - 1, self.last(i, version)) for i in self.reads[o]]
        self._leave(key)
        for (i, version), (before, last) in zip(made, lasts, strict=True):
            self._live(key, last, -self.nbytes[i])
            self._change(before, self.last(i, version - 1), self.nbytes[i])
        for i, version, last in read:
            self._change(self.last(i, version), last, -self.nbytes[i])
        self._delete(key)

    def keep(self) -> None:
        """Keep what lies where, for `back`."""
        self._kept = self._lies[:, : len(self.keys)].copy()

    def back(self, changes: list[tuple[bool, int]]) -> None:
        """Take back what was added, or removed, since `keep`: in half the time that it takes to do the opposite."""
        for added, key in reversed(changes):
            (self._leave if added else self._enter)(key)
            place = bisect_left(self.keys, key)
            if added:
                del self.keys[place]
            else:
                self.keys.insert(place, key)
        self._lies[:, : len(self.keys)] = self._kept

    def last(self, i: int, version: int) -> int:
        """The key of the last that reads what was made of an item at a time."""
        made, uses = self.made[i], self.uses[i]
        begin = made[version]
        first = bisect_right(uses, begin)
        end = bisect_left(uses, made[version + 1]) if version + 1 < len(made) else len(uses)
        if first == end:
            return begin
        if views := self.views[i]:
            return max(views.get(use, use) for use in uses[first:end])
        return uses[end - 1]

    def is_read(self, i: int, key: int) -> bool:
        """Whether anybody reads what the re-run with this key makes of an item."""
        version, uses = bisect_left(self.made[i], key), self.uses[i]
        first = bisect_right(uses, key)
        return first < len(uses) and (version + 1 == len(self.made[i]) or uses[first] < self.made[i][version + 1])

    def plan(self) -> Plan:
        """The decisions that run again what is to."""
        gaps, items = self.program.gaps, self.program.storages
        every = frozenset(gaps.producer)
        reruns = RecomputeOrder(gaps, frozenset(s for s, op in gaps.producer.items() if not gaps.trace.op[op].once))
        again: dict[int, set[str]] = {position: set() for position in gaps.reads}
        for key in self.runs:
            position, o = divmod(key, self.stride)
            again.setdefault(position, set()).update(items[i].storage for i in self.pieces.made[o])
        for position, new in sorted(again.items()):
            reruns.drop(every - new)
            reruns.recompute([reruns.whole_value(storage) for storage in sorted(new)], position, frozenset(new))
            reruns.recompute(gaps.reads.get(position, ()), position, frozenset(new))
        return tuple(reruns.decisions)

    def _key(self, position: int) -> int:
        return (position + 1) * self.stride - 1

    def _own(self, o: int) -> int:
        op = self.program.gaps.trace.op[self.program.producers[o].value]
        return op.workspace + op.nbytes - sum(self.nbytes[i] for i in self.pieces.made[o])

    def _crossing(self) -> Ints:
        change = np.zeros(self.program.size + 1, dtype=np.int64)
        for life in self.program.captured.lifetimes:
            # Tangents are there from the first of backward on, a re-run or not.
            change[life.first + (life.kind != "tangent")] += life.nbytes
            change[life.last + 1] -= life.nbytes
        return np.cumsum(change)[:-1]

    def _views(self, i: int) -> dict[int, int]:
        """Of the uses of an item that are views of it, the last that reads it so."""
        storage, ops = self.program.storages[i].storage, self.program.gaps.trace.ops
        views = (use for use in self.pieces.uses[i] if storage in ops[use].holds)
        return {self._key(use): self._key(self._seen[use]) for use in views}

    @cached_property
    def _seen(self) -> dict[int, int]:
        """The last position that reads each backward op, or a view of it."""
        ops, op = self.program.gaps.trace.ops, self.program.gaps.trace.op
        last: dict[str, int] = {}
        for position in reversed(range(self.program.boundary, self.program.size)):
            mine = ops[position]
            for read in mine.reads:
                is_view = not set(op[read].holds).isdisjoint(mine.holds)
                last[read] = max(last.get(read, 0), last.get(mine.name, position) if is_view else position)
        return {i: last.get(ops[i].name, i) for i in range(self.program.boundary, self.program.size)}

    def _enter(self, key: int) -> None:
        """A re-run is one of those that read and make items."""
        o = key % self.stride
        insort(self.runs, key)
        self.us += self.program.producers[o].us
        for i in self.reads[o]:
            insort(self.uses[i], key)
        for i in self.pieces.made[o]:
            insort(self.made[i], key)

    def _leave(self, key: int) -> None:
        """It is none of them any more."""
        o = key % self.stride
        del self.runs[bisect_left(self.runs, key)]
        self.us -= self.program.producers[o].us
        for i in self.reads[o]:
            del self.uses[i][bisect_left(self.uses[i], key)]
        for i in self.pieces.made[o]:
            del self.made[i][bisect_left(self.made[i], key)]

    def _insert(self, key: int, own: int) -> None:
        """A moment at which only what lies there before and behind it does, and what a re-run takes beside."""
        place, size = bisect_left(self.keys, key), len(self.keys)
        if size == self._lies.shape[1]:
            self._lies = np.concatenate((self._lies, np.zeros((2, GROWTH), dtype=np.int64)), axis=1)
        self._lies[:, place + 1 : size + 1] = self._lies[:, place:size]
        self._lies[0, place] = self._lies[1, place] + own
        self.keys.insert(place, key)

    def _delete(self, key: int) -> None:
        place, size = bisect_left(self.keys, key), len(self.keys)
        self._lies[:, place : size - 1] = self._lies[:, place + 1 : size]
        del self.keys[place]

    def _change(self, before: int, last: int, nbytes: int) -> None:
        """So many bytes more, or less, lie there after one moment until another."""
        if before < last:
            lies = self._lies[:, bisect_right(self.keys, before) : bisect_right(self.keys, last)]
            lies += nbytes

    def _live(self, first: int, last: int, nbytes: int) -> None:
        """The same from the moment on at which they are made."""
        begin = bisect_left(self.keys, first)
        lies = self._lies[:, begin : bisect_right(self.keys, last)]
        lies += nbytes
        lies[1, 0] -= nbytes
