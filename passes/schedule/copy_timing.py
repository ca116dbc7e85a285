"""Choose when copies begin and end, by simulating the links and the memory of a plan.

    w, 10 MB, is reloaded for mm_9; the link is idle from mm_5 on  ->   the reload begins before mm_5, or before the
                                                                        first op from which on there is room for it
    g, 10 MB, is offloaded after mm_3; the copy ends during mm_6   ->   g is freed after mm_6, or before the first op
                                                                        that needs its bytes

A link is never idle while there is room for the next reload.  No reload begins before the link is ready for it, as it
would take the room of one that is needed first.  What a plan recomputes, offloads or streams stays as it is, but some
streamed values stay from one use to the next (`staying`).

Keep a reloaded value until its next use, where the budget has room: that saves a reload.

    w, 10 MB, is reloaded for mm_3 and for mm_90; no op between needs more than 60 of 72 MB   ->   only for mm_3

The shortest intervals come first: they take the least memory for what they save.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.arrays import Floats
from ..ir.decisions import Offload, Plan, Reload, Stream, apply
from ..ir.machine import Machine
from ..ir.ops import FREE, NARROW, OFFLOAD, RELOAD, free_name, reload_name
from ..simulate.forecast import Forecast, Queues, predict, tier_of, update_nbytes

BEHIND = (NARROW, OFFLOAD, FREE)  # follow an op
SPARED = 8  # 1/SPARED of the budget is left to pending copies by values that stay


def retime_copies(
    gaps: ReuseGaps, machine: Machine, plan: Plan, forecast: Forecast, until: float = math.inf
) -> tuple[Plan, Forecast]:
    """Return the plan with other times for its copies and its forecast, if that is faster or nearer to the budget.

    From `until` on, as `time.monotonic` has it, no second way is tried.
    """
    if not has_copies(plan):
        return plan, forecast

    def rank(timed: tuple[Plan, Forecast]) -> tuple[int, float]:
        return max(0, timed[1].peak - machine.budget), timed[1].us

    best = plan, forecast
    for timed in _timed(gaps, machine, plan):
        best = min(best, timed, key=rank)
        if time.monotonic() >= until:
            break
    return best


def has_copies(plan: Plan) -> bool:
    """Return True if a plan copies anything."""
    return any(isinstance(decision, Offload | Reload) for decision in plan)


def _timed(gaps: ReuseGaps, machine: Machine, plan: Plan) -> Iterator[tuple[Plan, Forecast]]:
    """Yield timings: with as few reloads of streamed values as fit, and with all, which mostly is worse."""
    late = _late(plan)
    late_forecast = predict(apply(gaps.trace, late), machine)
    seen = set[Plan]()
    for spared in (machine.budget // SPARED, 0, machine.budget):
        fewer = keep_between_uses(late, late_forecast, machine.budget - spared)
        if fewer not in seen:
            seen.add(fewer)
            least = late_forecast if fewer == late else predict(apply(gaps.trace, fewer), machine)
            timed = _Walk(gaps, machine, fewer, least).run()
            yield timed, predict(apply(gaps.trace, timed), machine)
    # The walk looks at captured ops only, so a cast behind one may exceed the budget.  A budget that an error names, as
    # a plan was found for it, has to work.
    yield late, late_forecast


def _late(plan: Plan) -> Plan:
    """Return the plan with copies that compute waits for: they take the least memory."""
    return tuple(
        replace(decision, back=decision.use)
        if isinstance(decision, Reload)
        else replace(decision, free=decision.out)
        if isinstance(decision, Offload)
        else decision
        for decision in plan
    )


@dataclass(frozen=True, slots=True)
class PendingReload:
    """A reload that waits for the link or for memory: its line, the index of its decision, its bytes, and the first
    captured op before which it may begin."""

    name: str
    line: int
    place: int
    nbytes: int
    first: int


@dataclass(frozen=True, slots=True)
class PendingOffload:
    """A pending copy out: its end, the index of its decision, its bytes, and the captured op behind which it has to
    have ended."""

    end: float
    place: int
    nbytes: int
    last: int


class _Walk:
    """Runs the lines of a plan, and lets its copies begin sooner and end later."""

    def __init__(self, gaps: ReuseGaps, machine: Machine, plan: Plan, forecast: Forecast) -> None:
        self.gaps, self.machine, self.forecast, self.trace = gaps, machine, forecast, forecast.trace
        self.plan = list(plan)
        self.nbytes = forecast.total.copy()  # at each line, with reloads that have begun early
        self.queues, self.now = Queues(self.trace, machine), 0.0
        self.reloads: dict[str, deque[PendingReload]] = defaultdict(deque)  # of each tier
        for reload in sorted(self._pending_reloads(), key=lambda reload: reload.line):
            self.reloads[tier_of(self.trace, self.trace.op[reload.name])].append(reload)
        self.outs = {free_name(decision.value): k for k, decision in enumerate(plan) if isinstance(decision, Offload)}
        self.early = set[str]()
        self.offloads: list[PendingOffload] = []

    def run(self) -> Plan:
        captured, places = self.gaps.trace.index, self.places
        for line, op in enumerate(self.trace.ops):
            if op.name in captured:
                for tier in self.reloads:
                    self._begin_reloads(line, tier)
            if op.fn == FREE:
                self._begin_offload(op.name)
            elif op.fn != RELOAD:
                self.now = self.queues.run(self.now, op)
            elif op.name not in self.early:
                self.reloads[tier_of(self.trace, op)].popleft()
                self.now = self.queues.run(self.now, op)
            if line == self.ends[places[line]] and self.offloads:
                self._free(line)
        return tuple(self.plan)

    def _begin_reloads(self, line: int, tier: str) -> None:
        """Begin the reloads that a link is ready for while a captured op runs, in the order of their uses."""
        place, reloads = self.places[line], self.reloads[tier]
        while reloads and self.queues.idle["back", tier] < self.now + self.us[place]:
            reload = reloads[0]
            if reload.first > place or not self._has_room(reload, line):
                return
            reloads.popleft()
            self.early.add(reload.name)
            self.nbytes[line : reload.line] += reload.nbytes
            self.plan[reload.place] = replace(self._reload(reload.place), back=self.gaps.trace.ops[place].name)
            self.now = self.queues.run(self.now, self.trace.op[reload.name])

    def _has_room(self, reload: PendingReload, line: int) -> bool:
        """Return True if a reload fits from a line on.  Pending offloads have ended when the link gets to it."""
        room = self.machine.budget - reload.nbytes
        behind = self.ends[self.places[line]] + 1
        pending = sum(offload.nbytes for offload in self.offloads)
        return self.nbytes[line : reload.line].max() <= room and self.nbytes[line:behind].max() + pending <= room

    def _begin_offload(self, name: str) -> None:
        """Note that a copy out has begun."""
        place, op = self.outs[name], self.trace.op[name]
        decision = self.plan[place]
        assert isinstance(decision, Offload)
        out, boundary = self.gaps.trace.index[decision.out], self.gaps.trace.boundary
        last = boundary - 1 if out < boundary else self.gaps.streamable.offload_deadline(decision.value)
        nbytes = self.trace.nbytes[self.trace.op[op.reads[1]].holds[0]]
        self.offloads.append(PendingOffload(self.queues.ends[op.reads[0]], place, nbytes, max(out, last)))

    def _free(self, line: int) -> None:
        """Free behind a captured op what has been offloaded; wait for the rest if the next op needs the memory."""
        place, kept = self.places[line], list[PendingOffload]()
        following = self.nbytes[line + 1 : self.ends[min(place + 1, len(self.ends) - 1)] + 1]
        room = self.machine.budget - int(following.max(initial=0)) - sum(each.nbytes for each in self.offloads)
        for offload in self.offloads:
            if offload.end > self.now and place < offload.last and room >= 0:
                kept.append(offload)
                continue
            self.now, room = max(self.now, offload.end), room + offload.nbytes
            decision = self.plan[offload.place]
            assert isinstance(decision, Offload)
            self.plan[offload.place] = replace(decision, free=self.gaps.trace.ops[place].name)
        self.offloads = kept

    def _pending_reloads(self) -> Iterator[PendingReload]:
        """Yield all reloads."""
        last_line = {life.storage: life.last for life in self.forecast.lifetimes}
        boundary, ops = self.gaps.trace.boundary, self.gaps.trace.ops
        begin = next((i for i, op in enumerate(ops) if not op.is_input), 0)
        count: dict[str, int] = {}
        for place in range(len(self.plan)):
            if not isinstance(self.plan[place], Reload):
                continue
            decision = self._reload(place)
            number = count[decision.value] = count.get(decision.value, 0) + 1
            name, before = reload_name(decision.value, number), reload_name(decision.value, number - 1)
            first = boundary if self.gaps.trace.index[decision.use] >= boundary else begin
            if before in last_line:  # one copy at a time
                first = max(first, self.places[last_line[before]] + 1)
            yield PendingReload(name, self.trace.index[name], place, self.trace.op[name].nbytes, first)

    def _reload(self, place: int) -> Reload:
        decision = self.plan[place]
        assert isinstance(decision, Reload)
        return decision

    @cached_property
    def places(self) -> list[int]:
        """Return for each line the captured op (by index) at it, or the last one before it."""
        places, place = list[int](), 0
        for op in self.trace.ops:
            place = self.gaps.trace.index.get(op.name, place)
            places.append(place)
        return places

    @cached_property
    def ends(self) -> list[int]:
        """Return for each captured op the last line that follows it."""
        ends = [self.trace.index[op.name] for op in self.gaps.trace.ops]
        for place, line in enumerate(ends):
            while line + 1 < len(self.trace.ops) and self.trace.ops[line + 1].fn in BEHIND:
                line += 1
            ends[place] = line
        return ends

    @cached_property
    def us(self) -> Floats:
        """Return the compute time from each captured op to the next one.  No reload begins just before an update that
        needs the link itself."""
        us = np.zeros(len(self.gaps.trace.ops))
        for place, op in zip(self.places, self.trace.ops, strict=True):
            us[place] += -np.inf if op.phase == "update" and update_nbytes(self.trace, op) else op.us
        return us


@dataclass(frozen=True, order=True, slots=True)
class IdleInterval:
    """From the line after the last use of a reloaded copy, `first`, to the next reload, at `last`."""

    us: float
    first: int
    last: int
    nbytes: int
    place: int  # index of the decision of that reload


def keep_between_uses(plan: Plan, forecast: Forecast, room: int) -> Plan:
    """Return the plan without reloads of values that can stay within `room` bytes; `forecast` is the plan's."""
    nbytes, saved = forecast.total.copy(), set[int]()
    for interval in sorted(_idle_intervals(plan, forecast)):
        lines = slice(interval.first, interval.last)
        if int(nbytes[lines].max(initial=0)) + interval.nbytes <= room:
            nbytes[lines] += interval.nbytes
            saved.add(interval.place)
    return tuple(decision for place, decision in enumerate(plan) if place not in saved)


def _idle_intervals(plan: Plan, forecast: Forecast) -> Iterator[IdleInterval]:
    streamed = {decision.value for decision in plan if isinstance(decision, Stream)}
    last_line = {life.storage: life.last for life in forecast.lifetimes}
    index = forecast.trace.index
    count: dict[str, int] = {}
    for place, decision in enumerate(plan):
        if isinstance(decision, Reload) and (value := decision.value) in streamed:
            number = count[value] = count.get(value, 0) + 1
            if number > 1:
                first, name = last_line[reload_name(value, number - 1)] + 1, reload_name(value, number)
                last, nbytes = index[name], forecast.trace.op[name].nbytes
                yield IdleInterval(
                    forecast.begins[last] - forecast.begins[min(first, last)], first, last, nbytes, place
                )
