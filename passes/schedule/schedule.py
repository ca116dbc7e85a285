"""Turn the placement of each storage into decisions.

    {a: Placement.RECOMPUTE, h: Placement.OFFLOAD}  ->  Offload("h", ...), Recompute("a", before="relu_backward"), ...

Backward is walked in order.  What an op needs and is not on the device is recomputed or reloaded just before it, depth
first.
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
    """The placement of a forward storage after its last use in forward, or of streamed state."""

    KEEP = "keep"
    RECOMPUTE = "recompute"  # at its first use in backward, and kept until its last
    RECOMPUTE_PER_USE = "recompute per use"  # before each use in backward
    OFFLOAD = "offload"  # copied out and back while compute runs
    OFFLOAD_BLOCKING = "offload blocking"  # copied out and back while compute waits
    RELOAD_PER_USE = "reload per use"  # the same, and copied back before each use
    STREAM = "stream"  # of an input: copied back before each use while compute runs
    CAST_OFFLOAD = "cast offload"  # as the three above, cast for the copy
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
)  # of an input or a gradient that is offloaded
PER_USE = (Placement.RECOMPUTE_PER_USE, Placement.RELOAD_PER_USE, Placement.CAST_RELOAD_PER_USE)
Placements = Mapping[str, Placement]


def schedule(gaps: ReuseGaps, placements: Placements, machine: Machine) -> Plan:
    """Return the decisions that carry out `placements`; other storages are kept if backward reads them."""
    return _Scheduler(gaps, placements, machine).plan()


def placement_of(gaps: ReuseGaps, placements: Placements, storage: str) -> Placement:
    """Return the placement of `storage`: by default kept if backward reads it, or if it may not be recomputed."""
    if storage in placements:
        return placements[storage]
    once = gaps.trace.op[gaps.producer[storage]].once
    return Placement.KEEP if storage in gaps.uses or once else Placement.RECOMPUTE


def offloaded_nbytes(gaps: ReuseGaps, machine: Machine, storage: str, placement: Placement) -> int:
    """Return the bytes that `storage` takes on the tier with this placement."""
    if placement not in OFFLOADED and placement not in STATE_OFFLOADED:
        return 0
    return gaps.wire_nbytes(storage, machine.cast.dtype) if placement in CAST else gaps.trace.nbytes[storage]


class _Scheduler:
    """Walks backward, and notes what is recomputed or reloaded before each op."""

    def __init__(self, gaps: ReuseGaps, placements: Placements, machine: Machine) -> None:
        self.gaps = gaps
        self.placements = {storage: placement_of(gaps, placements, storage) for storage in gaps.producer}
        self.freed = {storage for storage, each in self.placements.items() if each is not Placement.KEEP}
        ahead = {s: f in (Placement.OFFLOAD, Placement.STREAM) for s, f in placements.items() if f in STATE_OFFLOADED}
        self.streamed = StreamedValues(
            gaps, machine, ahead, {s for s, f in placements.items() if f is Placement.STREAM}
        )
        self.links = _Links(
            gaps, self.placements, machine, updates_of(gaps.trace, ahead) if machine.link.half_duplex else ()
        )
        self.resident: set[str] = set()  # restored values that stay
        self.for_one_op: set[str] = set()  # restored values that do not
        self.offloaded: set[str] = set()
        self.decisions: list[Decision | ReloadWindow] = []

    def plan(self) -> Plan:
        self.decisions += self.streamed.begin()
        for index, values in self._reads():
            self.for_one_op.clear()
            for value in values:
                self._restore(value, index)
            self.streamed.note_run(index)
        return (*self.links.early(self.decisions), *self.streamed.offload_gradients())

    def _reads(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield the ops (by index) that read movable or streamed values, with these values."""
        reads, streamed = self.gaps.reads, self.streamed.reads
        for index in sorted({*reads, *streamed}) if streamed else reads:
            yield index, (*streamed.get(index, ()), *reads.get(index, ()))

    def _restore(self, value: str, index: int) -> None:
        """Restore `value` for the op at `index`: depth first, without recursion, as chains are long."""
        todo = [(value, False)]
        while todo:
            value, ready = todo.pop()
            if self._has(value, index):
                continue
            if self._reload(value, index):
                continue
            if ready:
                self._recompute(value, index)
                continue
            todo.append((value, True))
            reads = self.gaps.trace.op[value].reads
            todo += [
                (read, False) for read in reversed(reads) if read in self.gaps.holds or self.streamed.is_streamed(read)
            ]

    def _has(self, value: str, index: int) -> bool:
        if self.streamed.is_streamed(value):
            return self.streamed.has(value, index)
        if value in self.resident or value in self.for_one_op:
            return True
        return self.freed.isdisjoint(self.gaps.holds[value])

    def _reload(self, value: str, index: int) -> bool:
        """Reload `value` before the op at `index` if it was offloaded; return whether it was."""
        if self.streamed.is_streamed(value):
            is_input = self.streamed.is_input(value)
            if is_input:
                self.decisions.append(self.streamed.reload(value, index))
            return is_input
        storage = self.gaps.holds[value][0]
        if self.placements[storage] not in OFFLOADED or self.gaps.whole_value.get(storage) != value:
            return False
        if value not in self.offloaded:
            self.decisions.append(self.links.offload(storage))
            self.offloaded.add(value)
        self.decisions.append(self.links.reload(storage, index))
        self._note_restored(value)
        return True

    def _note_restored(self, value: str) -> None:
        """Note that `value` is on the device: until its last use, or for one op only."""
        first, *others = self.gaps.holds[value]
        per_use = bool(others) or self.placements[first] in PER_USE
        (self.for_one_op if per_use else self.resident).add(value)

    def _recompute(self, value: str, index: int) -> None:
        self.decisions.append(Recompute(value, self.gaps.trace.ops[index].name))
        if self.streamed.is_streamed(value):
            self.streamed.note_view(value)
            return
        self._note_restored(value)
        for item in self.gaps.getitems.get(value, ()):
            if not self._has(item, index) and self._is_used_later(item, index):
                self._recompute(item, index)

    def _is_used_later(self, value: str, index: int) -> bool:
        """Return True if a recomputed item has a use from here on: then it is taken out now."""
        storage = self.gaps.holds[value][0]
        later = self.gaps.uses.get(storage, (-1,))[-1] >= index
        return later and self.placements[storage] is Placement.RECOMPUTE


class _Links:
    """Places the begin and the end of copies so that they overlap the compute of the step as captured."""

    def __init__(self, gaps: ReuseGaps, placements: Placements, machine: Machine, updates: Container[int]) -> None:
        """`updates` are those (by index) that keep the link busy."""
        self.gaps = gaps
        self.placements = placements
        self.machine = machine
        self.updates = updates
        self.nbytes = {storage: offloaded_nbytes(gaps, machine, storage, each) for storage, each in placements.items()}
        overlapped = [storage for storage in gaps.producer if placements[storage] in OVERLAPPED]
        self.freed = self._freed(sorted(overlapped, key=lambda s: gaps.last_forward_use[s]))

    def offload(self, storage: str) -> Offload:
        out = self.gaps.last_forward_use[storage]
        free = self.freed.get(storage, out)
        wire = self.machine.cast.dtype if self.placements[storage] in CAST else ""
        return Offload(
            self.gaps.whole_value[storage], self.gaps.trace.ops[out].name, self.gaps.trace.ops[free].name, wire
        )

    def reload(self, storage: str, use: int) -> ReloadWindow:
        """Return the reload for the op at `use`, which begins early if it may overlap compute."""
        first = self.gaps.trace.boundary if self.placements[storage] in OVERLAPPED else use
        return ReloadWindow(self.gaps.whole_value[storage], self.nbytes[storage], use, first)

    def early(self, decisions: Sequence[Decision | ReloadWindow]) -> list[Decision]:
        """Return the decisions, with reloads that begin early enough to end before their use."""
        begins, ends = self._blocks(decisions)
        ops, due, early = self.gaps.trace.ops, float("inf"), list[Decision]()
        for decision in reversed(decisions):
            if not isinstance(decision, ReloadWindow):
                early.append(decision)
                continue
            use = back = decision.use
            if decision.first < use:  # else compute waits for this one, and others are not late
                due = min(due, begins[use]) - decision.nbytes / self.machine.link.back
                back = min(use, max(bisect.bisect_right(ends, due) - 1, decision.first))
            early.append(Reload(decision.value, ops[back].name, ops[use].name))
        return early[::-1]

    def _blocks(self, decisions: Sequence[Decision | ReloadWindow]) -> tuple[list[float], list[float]]:
        """Return when the recomputed ops before each op begin, and when the op itself does."""
        recompute_us = [0.0] * len(self.gaps.trace.ops)
        for decision in decisions:
            if isinstance(decision, Recompute):
                recompute_us[self.gaps.trace.index[decision.before]] += self.gaps.trace.op[decision.value].us
        ends = [begin + ran for begin, ran in zip(self._begins, accumulate(recompute_us), strict=False)]
        return [end - ran for end, ran in zip(ends, recompute_us, strict=True)], ends

    @cached_property
    def _begins(self) -> list[float]:
        """Return when each op begins, without the time of updates that keep the link busy."""
        spent = accumulate((op.us * (i in self.updates) for i, op in enumerate(self.gaps.trace.ops)), initial=0.0)
        return [begin - us for begin, us in zip(self.gaps.begins, spent, strict=True)]

    def _freed(self, storages: list[str]) -> dict[str, int]:
        """Map each storage to the forward op during which its copy out ends."""
        idle, freed = 0.0, {}
        for storage in storages:
            out = self.gaps.last_forward_use[storage]
            idle = max(idle, self.gaps.begins[out + 1]) + self.nbytes[storage] / self.machine.link.out
            ended = bisect.bisect_left(self.gaps.begins, idle) - 1
            freed[storage] = max(out, min(ended, self.gaps.trace.boundary - 1))
        return freed
