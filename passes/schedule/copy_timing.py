"""When copies begin and end, as somebody says who has the clock, the links and the room before him.

    w, 10 MB, is fetched for mm_9; the link is idle from mm_5 on   ->   it begins before mm_5; or before the first op
                                                                        from which on all have room for it
    g, 10 MB, leaves behind mm_3; its copy ends while mm_6 runs    ->   compute waits for it behind mm_6; or before the
                                                                        first op that has no room for it

A link is never idle while there is room for what comes next, and nothing lies there before the link is ready for it:
what begins too early takes the room of what is wanted first.  What runs again, leaves or lives far stays as it is; of
what lives far some stays from one visit to the next (`staying`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.arrays import Floats
from ..ir.decisions import Offload, Plan, Reload, apply
from ..ir.machine import Machine
from ..ir.ops import FREE, NARROW, OFFLOAD, RELOAD, free_name, reload_name
from ..simulate.forecast import Forecast, Queues, predict, update_nbytes
from .staying import keep_between_uses

BEHIND = (NARROW, OFFLOAD, FREE)  # stand behind an op
SPARED = 8  # of the budget that part, which what stays leaves to what is under way, or takes as well


def retime_copies(
    gaps: ReuseGaps, machine: Machine, plan: Plan, forecast: Forecast, until: float = math.inf
) -> tuple[Plan, Forecast]:
    """The plan, whose forecast is given, with other times for its copies, if the step is faster then or nearer to the
    budget; and its forecast.  From `until` on, as `time.monotonic` has it, no second way is tried."""
    if not has_copies(plan):
        return plan, forecast

    def rank(found: tuple[Plan, Forecast]) -> tuple[int, float]:
        return max(0, found[1].peak - machine.budget), found[1].us

    best = plan, forecast
    for found in _timed(gaps, machine, plan):
        best = min(best, found, key=rank)
        if time.monotonic() >= until:
            break
    return best


def has_copies(plan: Plan) -> bool:
    """Whether there is a copy whose time could be another."""
    return any(isinstance(decision, Offload | Reload) for decision in plan)


def _timed(gaps: ReuseGaps, machine: Machine, plan: Plan) -> Iterator[tuple[Plan, Forecast]]:
    """With those fetches alone for which there is no room to stay, and with all that it says, which mostly is worse."""
    late = _late(plan)
    held = predict(apply(gaps.trace, late), machine)
    seen = set[Plan]()
    for spared in (machine.budget // SPARED, 0, machine.budget):
        fewer = keep_between_uses(late, held, machine.budget - spared)
        if fewer not in seen:
            seen.add(fewer)
            least = held if fewer == late else predict(apply(gaps.trace, fewer), machine)
            timed = _Walk(gaps, machine, fewer, least).run()
            yield timed, predict(apply(gaps.trace, timed), machine)
    # What is cast behind one op may have no room beside what leaves behind it: the walk looks at ops.  So a budget that
    # is named because a plan was found for it is one for which a plan is found.
    yield late, held


def _late(plan: Plan) -> Plan:
    """The plan with copies for which compute waits: those that take the least room."""
    return tuple(
        replace(said, back=said.use)
        if isinstance(said, Reload)
        else replace(said, free=said.out)
        if isinstance(said, Offload)
        else said
        for said in plan
    )


@dataclass(frozen=True, slots=True)
class PendingReload:
    """A fetch that waits for the link or for room: its line, the decision's place, its bytes, and the first captured op
    before which it may begin."""

    name: str
    line: int
    place: int
    nbytes: int
    first: int


@dataclass(frozen=True, slots=True)
class PendingOffload:
    """A copy out that is under way: when it ends, the decision's place, its bytes, and the captured op behind which it
    has to have ended."""

    end: float
    place: int
    nbytes: int
    last: int


class _Walk:
    """Runs the lines of a plan for whose copies compute waits, and lets these begin sooner and end later; `there` are
    the bytes at each line, with those of fetches that have begun."""

    def __init__(self, gaps: ReuseGaps, machine: Machine, plan: Plan, forecast: Forecast) -> None:
        self.gaps, self.machine, self.forecast, self.trace = gaps, machine, forecast, forecast.trace
        self.plan = list(plan)
        self.there = forecast.total.copy()
        self.queues, self.now = Queues(self.trace, machine), 0.0
        self.index = {op.name: line for line, op in enumerate(self.trace.ops)}
        self.coming = deque(sorted(self._comings(), key=lambda coming: coming.line))
        self.outs = {free_name(said.value): k for k, said in enumerate(plan) if isinstance(said, Offload)}
        self.begun = set[str]()
        self.leaving: list[PendingOffload] = []

    def run(self) -> Plan:
        captured, places = self.gaps.index, self.places
        for line, op in enumerate(self.trace.ops):
            if op.name in captured:
                self._begin(line)
            if op.fn == FREE:
                self._leave(op.name)
            elif op.fn != RELOAD:
                self.now = self.queues.run(self.now, op)
            elif op.name not in self.begun:
                self.coming.popleft()
                self.now = self.queues.run(self.now, op)
            if line == self.ends[places[line]] and self.leaving:
                self._let_go(line)
        return tuple(self.plan)

    def _begin(self, line: int) -> None:
        """Begin as many fetches before a captured op as the link is ready for while it runs; in the order of their
        uses, for who comes first to the link is served first."""
        place = self.places[line]
        while self.coming and self.queues.idle["back"] < self.now + self.us[place]:
            coming = self.coming[0]
            if coming.first > place or not self._has_room(coming, line):
                return
            self.coming.popleft()
            self.begun.add(coming.name)
            self.there[line : coming.line] += coming.nbytes
            self.plan[coming.place] = replace(self._reload(coming.place), back=self.gaps.trace.ops[place].name)
            self.now = self.queues.send(self.now, coming.name, "back", coming.nbytes)

    def _has_room(self, coming: PendingReload, line: int) -> bool:
        """Whether there is room from a line on.  What is leaving is gone when the link gets to it, or is waited for."""
        room = self.machine.budget - coming.nbytes
        behind = self.ends[self.places[line]] + 1
        held = sum(leaving.nbytes for leaving in self.leaving)
        return self.there[line : coming.line].max() <= room and self.there[line:behind].max() + held <= room

    def _leave(self, name: str) -> None:
        """A copy out has begun."""
        place, op = self.outs[name], self.trace.op[name]
        said = self.plan[place]
        assert isinstance(said, Offload)
        out, boundary = self.gaps.index[said.out], self.gaps.trace.boundary
        last = boundary - 1 if out < boundary else self.gaps.streamable.offload_deadline(said.value)
        nbytes = self.trace.nbytes[self.trace.op[op.reads[1]].holds[0]]
        self.leaving.append(PendingOffload(self.queues.ends[op.reads[0]], place, nbytes, max(out, last)))

    def _let_go(self, line: int) -> None:
        """Behind a captured op: what has left is gone; what has not is waited for, if the next one needs its room."""
        place, kept = self.places[line], list[PendingOffload]()
        following = self.there[line + 1 : self.ends[min(place + 1, len(self.ends) - 1)] + 1]
        room = self.machine.budget - int(following.max(initial=0)) - sum(each.nbytes for each in self.leaving)
        for leaving in self.leaving:
            if leaving.end > self.now and place < leaving.last and room >= 0:
                kept.append(leaving)
                continue
            self.now, room = max(self.now, leaving.end), room + leaving.nbytes
            said = self.plan[leaving.place]
            assert isinstance(said, Offload)
            self.plan[leaving.place] = replace(said, free=self.gaps.trace.ops[place].name)
        self.leaving = kept

    def _comings(self) -> Iterator[PendingReload]:
        """All fetches."""
        gone = {life.storage: life.last for life in self.forecast.lifetimes}
        boundary, ops = self.gaps.trace.boundary, self.gaps.trace.ops
        begin = next((i for i, op in enumerate(ops) if not op.is_input), 0)
        count: dict[str, int] = {}
        for place in range(len(self.plan)):
            if not isinstance(self.plan[place], Reload):
                continue
            said = self._reload(place)
            number = count[said.value] = count.get(said.value, 0) + 1
            name, before = reload_name(said.value, number), reload_name(said.value, number - 1)
            first = boundary if self.gaps.index[said.use] >= boundary else begin
            if before in gone:  # lest it is there twice
                first = max(first, self.places[gone[before]] + 1)
            yield PendingReload(name, self.index[name], place, self.trace.op[name].nbytes, first)

    def _reload(self, place: int) -> Reload:
        said = self.plan[place]
        assert isinstance(said, Reload)
        return said

    @cached_property
    def places(self) -> list[int]:
        """For each line the captured op (by index) at it, or the last one before it."""
        found, place = list[int](), 0
        for op in self.trace.ops:
            place = self.gaps.index.get(op.name, place)
            found.append(place)
        return found

    @cached_property
    def ends(self) -> list[int]:
        """For each captured op the last line that stands behind it."""
        found = [self.index[op.name] for op in self.gaps.trace.ops]
        for place, line in enumerate(found):
            while line + 1 < len(self.trace.ops) and self.trace.ops[line + 1].fn in BEHIND:
                line += 1
            found[place] = line
        return found

    @cached_property
    def us(self) -> Floats:
        """How long compute goes on from each captured op to the next one; nothing begins just before an update that
        takes the link itself."""
        found = np.zeros(len(self.gaps.trace.ops))
        for place, op in zip(self.places, self.trace.ops, strict=True):
            found[place] += -np.inf if op.phase == "update" and any(update_nbytes(self.trace, op)) else op.us
        return found
