"""From what shall become of each storage to the decisions that do it.

    {a: Placement.RECOMPUTE, h: Placement.OFFLOAD}  ->  Offload("h", ...), Recompute("a", before="relu_backward"), ...

Backward is walked in order; what an op needs and is not there is made again just before it, depth first, from what is
there.
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from itertools import accumulate

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Decision, Offload, Plan, Recompute, Reload
from ..ir.machine import Machine
from .streamed_values import ReloadWindow, StreamedValues, updates_of


class Placement(Enum):
    """What becomes of a forward storage after its last use in forward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"  # made again at its first use in backward, there until its last
    RECOMPUTE_PER_USE = "recompute per use"  # made again for each use
    OFFLOAD = "offload"  # copied away and back while compute goes on
    OFFLOAD_BLOCKING = "offload blocking"  # copied away and back while compute waits
    RELOAD_PER_USE = "reload per use"  # the same, and copied back for each use
    STREAM = "stream"  # of an input that lives far: copied here for each use while compute goes on
    CAST_OFFLOAD = "cast offload"  # as the three above, cast for its way
    CAST_OFFLOAD_BLOCKING = "cast offload blocking"
    CAST_RELOAD_PER_USE = "cast reload per use"


OVERLAPPED = (Placement.OFFLOAD, Placement.CAST_OFFLOAD)
CAST = (Placement.CAST_OFFLOAD, Placement.CAST_OFFLOAD_BLOCKING, Placement.CAST_RELOAD_PER_USE)
OFFLOADED = (Placement.OFFLOAD, Placement.OFFLOAD_BLOCKING, Placement.RELOAD_PER_USE, *CAST)
STATE_OFFLOADED = (
    Placement.OFFLOAD,
    Placement.OFFLOAD_BLOCKING,
    Placement.RELOAD_PER_USE,
    Placement.STREAM,
)  # of an input or a gradient: its home is far
PER_USE = (Placement.RECOMPUTE_PER_USE, Placement.RELOAD_PER_USE, Placement.CAST_RELOAD_PER_USE)
Placements = Mapping[str, Placement]


def schedule(gaps: ReuseGaps, fates: Placements, machine: Machine) -> Plan:
    """The decisions that carry out `fates`; storages that are not named are kept if backward reads them."""
    return _Scheduler(gaps, fates, machine).plan()


def placement_of(gaps: ReuseGaps, fates: Placements, storage: str) -> Placement:
    """What becomes of `storage`: what nobody in backward reads is made again if need be, unless it may not."""
    if storage in fates:
        return fates[storage]
    once = gaps.trace.op[gaps.producer[storage]].once
    return Placement.KEEP if storage in gaps.uses or once else Placement.RECOMPUTE


def offloaded_nbytes(gaps: ReuseGaps, machine: Machine, storage: str, fate: Placement) -> int:
    """The bytes that go to the far tier if `storage` has this fate."""
    if fate not in OFFLOADED and fate not in STATE_OFFLOADED:
        return 0
    return gaps.wire_nbytes(storage, machine.cast.dtype) if fate in CAST else gaps.trace.nbytes[storage]


class _Scheduler:
    """Walks backward; `lost` are the storages that are not kept, `there` the lost values that have been made again and
    stay, `now` those for one op only."""

    def __init__(self, gaps: ReuseGaps, fates: Placements, machine: Machine) -> None:
        self.gaps = gaps
        self.fates = {storage: placement_of(gaps, fates, storage) for storage in gaps.producer}
        self.lost = {storage for storage, known in self.fates.items() if known is not Placement.KEEP}
        ahead = {s: f in (Placement.OFFLOAD, Placement.STREAM) for s, f in fates.items() if f in STATE_OFFLOADED}
        self.streams = StreamedValues(gaps, machine, ahead, {s for s, f in fates.items() if f is Placement.STREAM})
        self.links = _Links(
            gaps, self.fates, machine, updates_of(gaps.trace, ahead) if machine.link.half_duplex else ()
        )
        self.there: set[str] = set()
        self.now: set[str] = set()
        self.sent: set[str] = set()
        self.decisions: list[Decision | ReloadWindow] = []

    def plan(self) -> Plan:
        self.decisions += self.streams.begin()
        for index, values in self._reads():
            self.now.clear()
            for value in values:
                self._need(value, index)
            self.streams.passed(index)
        return (*self.links.early(self.decisions), *self.streams.leave())

    def _reads(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The ops (by index) that read what can have been lost, and what they read of it."""
        reads, visits = self.gaps.reads, self.streams.visits
        for index in sorted({*reads, *visits}) if visits else reads:
            yield index, (*visits.get(index, ()), *reads.get(index, ()))

    def _need(self, value: str, index: int) -> None:
        """Make `value` be there for the op at `index`; depth first, without recursion: chains are long."""
        todo = [(value, False)]
        while todo:
            value, ready = todo.pop()
            if self._has(value, index):
                continue
            if self._fetch(value, index):
                continue
            if ready:
                self._again(value, index)
                continue
            todo.append((value, True))
            reads = self.gaps.trace.op[value].reads
            todo += [(read, False) for read in reversed(reads) if read in self.gaps.holds or self.streams.knows(read)]

    def _has(self, value: str, index: int) -> bool:
        if self.streams.knows(value):
            return self.streams.has(value, index)
        if value in self.there or value in self.now:
            return True
        return self.lost.isdisjoint(self.gaps.holds[value])

    def _fetch(self, value: str, index: int) -> bool:
        """Whether `value` is what was sent away; then it is fetched, before the op at `index`."""
        if self.streams.knows(value):
            is_home = self.streams.is_home(value)
            if is_home:
                self.decisions.append(self.streams.fetch(value, index))
            return is_home
        storage = self.gaps.holds[value][0]
        if self.fates[storage] not in OFFLOADED or self.gaps.whole_value.get(storage) != value:
            return False
        if value not in self.sent:
            self.decisions.append(self.links.offload(storage))
            self.sent.add(value)
        self.decisions.append(self.links.fetch(storage, index))
        self._arrive(value)
        return True

    def _arrive(self, value: str) -> None:
        """`value` is there: until its last use, or for the op at hand only."""
        first, *others = self.gaps.holds[value]
        passing = bool(others) or self.fates[first] in PER_USE
        (self.now if passing else self.there).add(value)

    def _again(self, value: str, index: int) -> None:
        self.decisions.append(Recompute(value, self.gaps.trace.ops[index].name))
        if self.streams.knows(value):
            self.streams.made(value)
            return
        self._arrive(value)
        for part in self.gaps.getitems.get(value, ()):
            if not self._has(part, index) and self._used_later(part, index):
                self._again(part, index)

    def _used_later(self, value: str, index: int) -> bool:
        """Whether what is one part of an op with several has a use from here on: then it is taken out now."""
        storage = self.gaps.holds[value][0]
        later = self.gaps.uses.get(storage, (-1,))[-1] >= index
        return later and self.fates[storage] is Placement.RECOMPUTE


class _Links:
    """Where copies begin and end, so that they hide behind compute as it would run if nothing were moved."""

    def __init__(self, gaps: ReuseGaps, fates: Placements, machine: Machine, updates: Container[int]) -> None:
        """`updates`: the places of updates with which the tier is busy."""
        self.gaps = gaps
        self.fates = fates
        self.machine = machine
        self.updates = updates
        self.sent = {storage: offloaded_nbytes(gaps, machine, storage, known) for storage, known in fates.items()}
        away = [storage for storage in gaps.producer if fates[storage] in OVERLAPPED]
        self.freed = self._freed(sorted(away, key=lambda s: gaps.last_forward_use[s]))

    def offload(self, storage: str) -> Offload:
        left = self.gaps.last_forward_use[storage]
        free = self.freed.get(storage, left)
        wire = self.machine.cast.dtype if self.fates[storage] in CAST else ""
        return Offload(
            self.gaps.whole_value[storage], self.gaps.trace.ops[left].name, self.gaps.trace.ops[free].name, wire
        )

    def fetch(self, storage: str, use: int) -> ReloadWindow:
        """Back for the op at `use`: ahead of it where compute goes on meanwhile, else just then."""
        first = self.gaps.trace.boundary if self.fates[storage] in OVERLAPPED else use
        return ReloadWindow(self.gaps.whole_value[storage], self.sent[storage], use, first)

    def early(self, decisions: Sequence[Decision | ReloadWindow]) -> list[Decision]:
        """The decisions with copies back that begin early enough to have ended where they are needed."""
        begins, ends = self._blocks(decisions)
        ops, due, found = self.gaps.trace.ops, float("inf"), list[Decision]()
        for decision in reversed(decisions):
            if not isinstance(decision, ReloadWindow):
                found.append(decision)
                continue
            use = back = decision.use
            if decision.first < use:  # else compute waits for it, and no other is late for that
                due = min(due, begins[use]) - decision.nbytes / self.machine.link.back
                back = min(use, max(bisect.bisect_right(ends, due) - 1, decision.first))
            found.append(Reload(decision.value, ops[back].name, ops[use].name))
        return found[::-1]

    def _blocks(self, decisions: Sequence[Decision | ReloadWindow]) -> tuple[list[float], list[float]]:
        """When what runs again before each op begins, and when the op itself does."""
        again = [0.0] * len(self.gaps.trace.ops)
        for decision in decisions:
            if isinstance(decision, Recompute):
                again[self.gaps.index[decision.before]] += self.gaps.trace.op[decision.value].us
        ends = [begin + ran for begin, ran in zip(self._begins, accumulate(again), strict=False)]
        return [end - ran for end, ran in zip(ends, again, strict=True)], ends

    @cached_property
    def _begins(self) -> list[float]:
        """When each op begins, without the updates with which the tier is busy: it carries nothing else meanwhile."""
        spent = accumulate((op.us * (i in self.updates) for i, op in enumerate(self.gaps.trace.ops)), initial=0.0)
        return [begin - us for begin, us in zip(self.gaps.begins, spent, strict=True)]

    def _freed(self, away: list[str]) -> dict[str, int]:
        """For each storage the forward op at whose end its copy out will have ended."""
        idle, freed = 0.0, {}
        for storage in away:
            left = self.gaps.last_forward_use[storage]
            idle = max(idle, self.gaps.begins[left + 1]) + self.sent[storage] / self.machine.link.out
            ended = bisect.bisect_left(self.gaps.begins, idle) - 1
            freed[storage] = max(left, min(ended, self.gaps.trace.boundary - 1))
        return freed
