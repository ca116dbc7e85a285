"""From what shall become of each storage to the decisions that do it.

    {a: Fate.RECOMPUTE, h: Fate.OFFLOAD}  ->  Offload("h", ...), Recompute("a", before="relu_backward"), ...

Backward is walked in order; what an op needs and is not there is made again just before it, depth first, from what is
there.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from enum import Enum

from .decisions import Decision, Offload, Plan, Recompute, Reload
from .gaps import Gaps
from .machine import Machine


class Fate(Enum):
    """What becomes of a forward storage after its last use in forward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"  # made again at its first use in backward, there until its last
    BRIEF = "brief"  # made again for each use
    OFFLOAD = "offload"  # copied away and back while compute goes on
    STALL = "stall"  # copied away and back while compute waits
    FETCH = "fetch"  # the same, and copied back for each use


AWAY = (Fate.OFFLOAD, Fate.STALL, Fate.FETCH)
PASSING = (Fate.BRIEF, Fate.FETCH)
Fates = Mapping[str, Fate]


def schedule(gaps: Gaps, fates: Fates, machine: Machine) -> Plan:
    """The decisions that carry out `fates`; storages that are not named are kept if backward reads them."""
    return _Scheduler(gaps, fates, machine).plan()


def fate(gaps: Gaps, fates: Fates, storage: str) -> Fate:
    """What becomes of `storage`: what nobody in backward reads is made again if need be, unless it may not."""
    if storage in fates:
        return fates[storage]
    once = gaps.trace.op[gaps.maker[storage]].once
    return Fate.KEEP if storage in gaps.uses or once else Fate.RECOMPUTE


class _Scheduler:
    """Walks backward; `there` are the lost values that have been made again and stay, `now` those for one op only."""

    def __init__(self, gaps: Gaps, fates: Fates, machine: Machine) -> None:
        self.gaps = gaps
        self.fates = {storage: fate(gaps, fates, storage) for storage in gaps.maker}
        self.links = _Links(gaps, self.fates, machine)
        self.there: set[str] = set()
        self.now: set[str] = set()
        self.sent: set[str] = set()
        self.decisions: list[Decision] = []

    def plan(self) -> Plan:
        for index, values in self.gaps.reads.items():
            self.now.clear()
            for value in values:
                self._need(value, index)
        return tuple(self.decisions)

    def _need(self, value: str, index: int) -> None:
        """Make `value` be there for the op at `index`; depth first, without recursion: chains are long."""
        todo = [(value, False)]
        while todo:
            value, ready = todo.pop()
            if self._has(value):
                continue
            if self._fetch(value, index):
                continue
            if ready:
                self._again(value, index)
                continue
            todo.append((value, True))
            reads = self.gaps.trace.op[value].reads
            todo += [(read, False) for read in reversed(reads) if read in self.gaps.held]

    def _has(self, value: str) -> bool:
        if value in self.there or value in self.now:
            return True
        return all(self.fates[storage] is Fate.KEEP for storage in self.gaps.held[value])

    def _fetch(self, value: str, index: int) -> bool:
        """Whether `value` is what was sent away; then it is fetched, before the op at `index`."""
        storage = self.gaps.held[value][0]
        if self.fates[storage] not in AWAY or self.gaps.root.get(storage) != value:
            return False
        if value not in self.sent:
            self.decisions.append(self.links.offload(storage))
            self.sent.add(value)
        self.decisions.append(self.links.reload(storage, index))
        self._arrive(value)
        return True

    def _arrive(self, value: str) -> None:
        """`value` is there: until its last use, or for the op at hand only."""
        storages = self.gaps.held[value]
        passing = len(storages) > 1 or self.fates[storages[0]] in PASSING
        (self.now if passing else self.there).add(value)

    def _again(self, value: str, index: int) -> None:
        self.decisions.append(Recompute(value, self.gaps.trace.ops[index].name))
        self._arrive(value)
        for part in self.gaps.parts.get(value, ()):
            if not self._has(part) and self._used_later(part, index):
                self._again(part, index)

    def _used_later(self, value: str, index: int) -> bool:
        """Whether what is one part of an op with several has a use from here on: then it is taken out now."""
        storage = self.gaps.held[value][0]
        later = self.gaps.uses.get(storage, (-1,))[-1] >= index
        return later and self.fates[storage] is Fate.RECOMPUTE


class _Links:
    """Where copies begin and end, so that they hide behind compute as it would run if nothing were moved."""

    def __init__(self, gaps: Gaps, fates: Fates, machine: Machine) -> None:
        self.gaps = gaps
        self.fates = fates
        self.machine = machine
        away = [storage for storage in gaps.maker if fates[storage] is Fate.OFFLOAD and storage in gaps.uses]
        self.freed = self._freed(sorted(away, key=lambda s: gaps.left[s]))
        self.fetched = self._fetched(sorted(away, key=lambda s: -gaps.uses[s][0]))

    def offload(self, storage: str) -> Offload:
        left = self.gaps.left[storage]
        free = self.freed.get(storage, left)
        return Offload(self.gaps.root[storage], self.gaps.trace.ops[left].name, self.gaps.trace.ops[free].name)

    def reload(self, storage: str, use: int) -> Reload:
        back = min(self.fetched.get(storage, use), use)
        return Reload(self.gaps.root[storage], self.gaps.trace.ops[back].name, self.gaps.trace.ops[use].name)

    def _freed(self, away: list[str]) -> dict[str, int]:
        """For each storage the forward op at whose end its copy out will have ended."""
        idle, freed = 0.0, {}
        for storage in away:
            left = self.gaps.left[storage]
            idle = max(idle, self.gaps.begins[left + 1]) + self.gaps.trace.nbytes[storage] / self.machine.out
            ended = bisect.bisect_left(self.gaps.begins, idle) - 1
            freed[storage] = max(left, min(ended, self.gaps.trace.boundary - 1))
        return freed

    def _fetched(self, away: list[str]) -> dict[str, int]:
        """For each storage the backward op before which its copy back has to begin, to have ended at its first use."""
        due, fetched = float("inf"), {}
        for storage in away:
            use = self.gaps.uses[storage][0]
            due = min(due, self.gaps.begins[use]) - self.gaps.trace.nbytes[storage] / self.machine.back
            begun = bisect.bisect_right(self.gaps.begins, due) - 1
            fetched[storage] = min(use, max(begun, self.gaps.trace.boundary))
        return fetched
