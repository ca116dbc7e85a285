"""A plan in which ops run again as often as need be, one re-run at a time: annealed, from nothing.

    nothing again, 865 MB over   ->   {b before 8, c before 9, b before 9, ...}, fits

A change is taken if the step gets better by it, or by chance if not much worse: chance ends as it cools, and what lies
over the budget weighs more and more.  The changes: what lies there at a moment goes, and is made again for who reads it
next; a re-run is left out; it moves to where others are that make what it reads or read what it makes; it is left out,
and other things go in its place.  What runs again for nobody goes with the last that reads it.

What is kept from forward is settled while it is hot, and of that chance decides: so many begin, and the best go on.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left, bisect_right

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Plan, apply
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..lp import solver
from ..lp.problem import PlanProblem
from ..lp.solver import INFINITY
from ..simulate.forecast import predict
from .phase_lp import Pieces
from .rerun_state import RerunState

ROUNDS = (12, 12), (4, 20), (1, 32)  # so many are cooled, each with so many tries an item
ITEMS = 128  # with more there are no more tries
REPAIRS = 3
HOT = 2.0  # at first, in the mean time of a re-run
COOLING = 2.3  # to a tenth
LIGHT = 0.4  # at first, a byte over the budget at a moment, in the mean time of a byte's re-run; it rises a hundredfold
STAYS = (0.0, 0.3, 1.0)  # the chance of what a re-run reads to stay until then, not to run again as well
SWAP, MOVE, LEAVE = 0.12, 0.32, 0.75  # of the chance, up to which a change is one of these
EAGER = 0.25  # more of it is for letting things go, where the budget is broken
LOOKS = 20  # for something that may go
GOES = 3  # things, for one that stays
CHANGES = 16  # of a try; where they are more it cools in fewer
PER_LOOK = 64  # tries, between two looks at the clock


def anneal(trace: Trace, machine: Machine, until: float = INFINITY) -> Plan:
    """The quickest plan found that fits and recomputes only; no decisions, if none fits.

    At `until`, as `time.monotonic` has it, it ends with what was found.  Without HiGHS nothing is searched here either:
    what is greedy is there in a moment.
    """
    if not solver.is_installed():
        return ()
    machine = machine.without_tier
    program = PlanProblem(ReuseGaps(trace), machine)
    if program.floor.max(initial=0.0) > machine.budget:
        return ()
    drawn = [nbytes for _, nbytes, _ in program.rng_draws]  # of generators: from forward on, and twice as they are set
    room = machine.budget - sum(drawn) - 2 * max(drawn, default=0)
    for _ in range(REPAIRS):
        found = _annealed(Pieces(program, machine.budget), room, until)
        plan = found.plan() if found else ()
        peak = predict(apply(trace, plan), machine).peak
        if peak <= machine.budget:
            return plan
        if found is None:
            break
        room -= peak - machine.budget  # of crumbs
    return ()


def _annealed(pieces: Pieces, room: int, until: float) -> RerunState | None:
    """The best re-runs found that fit; None if none do."""
    beginnings = [_Annealing(RerunState(pieces, room), seed, until) for seed in range(ROUNDS[0][0])]
    for count, tries in ROUNDS:
        beginnings = sorted(beginnings, key=lambda each: each.best_us)[:count]
        for each in beginnings:
            each.cool(tries * min(len(pieces.items), ITEMS))
    best = min(beginnings, key=lambda each: each.best_us)
    return RerunState(pieces, room).with_runs(best.best) if best.best_us < INFINITY else None


class _Annealing:
    """One beginning, and the best that came of it."""

    def __init__(self, moments: RerunState, seed: int, until: float) -> None:
        self.moments = moments
        self.random = random.Random(seed)
        self.until = until
        makers = moments.program.producers
        again = [o for o in moments.pieces.made if not makers[o].runs_once]
        self.once = frozenset(o for o in moments.pieces.made if makers[o].runs_once)
        self.items = [i for o in again for i in moments.pieces.made[o]]
        self.us = sum(makers[o].us for o in again) / max(1, len(again)) or 1.0  # of one re-run
        self.weight = self.us * len(self.items) / max(1, sum(moments.nbytes[i] for i in self.items))  # of a byte
        self.changes: list[tuple[bool, int]] = []  # what was added, and what removed, since the last step was taken
        self.changed = 0  # times
        self.best: tuple[int, ...] = ()
        self.best_us = INFINITY

    def cool(self, tries: int) -> None:
        """Melt what there is, and cool it in so many tries, or in fewer that change much."""
        us, over = self.moments.us, self.moments.over
        begun, tried, done = self.changed, 0, 0.0
        while self.items and done < 1.0:
            if tried % PER_LOOK == 0 and self.until < INFINITY and time.monotonic() >= self.until:
                return
            cold = _exp(COOLING * done)
            self.changes.clear()
            self.moments.keep()
            self._change(over > 0)
            new = self.moments.over
            worse = self.moments.us - us + self.weight * LIGHT / (cold * cold) * (new - over)
            if worse > 0 and self.random.random() >= _exp(worse / (self.us * HOT * cold)):
                self.moments.back(self.changes)
            else:
                us, over = self.moments.us, new
                if not over and us < self.best_us:
                    self.best, self.best_us = tuple(self.moments.runs), us
            tried += 1
            done = max(tried / tries, (self.changed - begun) / (CHANGES * tries))

    def _change(self, is_over: bool) -> None:
        """One change, whatever becomes of it."""
        kind, runs = self.random.random(), self.moments.runs
        leave = LEAVE - EAGER * is_over
        if not runs or kind > leave:
            self._go(self._moment(is_over))
        elif kind < SWAP:
            self._swap()
        elif kind < MOVE:
            self._move(self._any(runs))
        else:
            self._leave(self._any(runs))

    def _moment(self, is_over: bool) -> int:
        """Some key, of those over the budget if there are any."""
        if is_over:
            places = (self.moments.beyond > 0).nonzero()[0]
            return self.moments.keys[int(places[int(self.random.random() * len(places))])]
        return self._any(self.moments.keys)

    def _any(self, keys: list[int]) -> int:
        return keys[int(self.random.random() * len(keys))]

    def _go(self, at: int) -> None:
        """Something that lies there at a moment, and is not read then, goes, and runs again for who reads it next."""
        moments = self.moments
        for _ in range(LOOKS):
            i = self._any(self.items)
            uses, made = moments.uses[i], moments.made[i]
            place = bisect_right(uses, at)
            if place == len(uses) or (place and uses[place - 1] == at):
                continue
            begin = made[bisect_left(made, uses[place]) - 1]
            position = uses[place] // moments.stride
            if begin < at and max(begin, uses[place - 1] if place else 0) // moments.stride < position:
                self._again(moments.maker[i], position, self._stays())
                return

    def _stays(self) -> float:
        return STAYS[int(self.random.random() * len(STAYS))]

    def _again(self, o: int, position: int, stays: float) -> None:
        """A maker runs again before an op, and what it reads as well if it is not there then, or by chance stays."""
        moments, todo = self.moments, [o]
        while todo:
            w = todo.pop()
            key = position * moments.stride + w
            if not moments.has(key):
                self._add(key)
                gone = (i for i in moments.reads[w] if self._is_gone(i, key))
                todo += [moments.maker[i] for i in gone if self.random.random() >= stays]

    def _is_gone(self, i: int, key: int) -> bool:
        """Whether a re-run alone has an item wait for it, which may run again itself."""
        moments = self.moments
        uses, made = moments.uses[i], moments.made[i]
        begin, after = bisect_left(made, key), bisect_right(uses, key)
        if after < len(uses) and (begin == len(made) or uses[after] < made[begin]):
            return False
        before = max(made[begin - 1], uses[after - 2] if after > 1 else 0)
        return before // moments.stride < key // moments.stride and moments.maker[i] not in self.once

    def _leave(self, key: int) -> None:
        """A re-run is left out."""
        self._remove(key)
        self._prune(self.moments.reads[key % self.moments.stride])

    def _move(self, key: int) -> None:
        """A re-run moves to another position."""
        moments, o = self.moments, key % self.moments.stride
        found: set[int] = set()
        for i in (*moments.reads[o], *moments.pieces.made[o]):
            place = bisect_left(moments.uses[i], key)
            found.update(moments.uses[i][max(0, place - 2) : place + 3])
            place = bisect_left(moments.made[i], key)
            found.update(moments.made[i][max(1, place - 1) : place + 2])
        positions = {each // moments.stride for each in found} - {key // moments.stride}
        if places := sorted(position for position in positions if position >= moments.program.boundary):
            self._remove(key)
            self._again(o, self._any(places), self._stays())
            self._prune([*moments.reads[o], *moments.pieces.made[o]])

    def _swap(self) -> None:
        """A re-run is left out, and others come where it is fullest then, as long as more is over the budget."""
        before = self.moments.over
        self._leave(self._any(self.moments.runs))
        for _ in range(GOES):
            if self.moments.over <= before:
                break
            self._go(self.moments.keys[int(self.moments.beyond.argmax())])

    def _prune(self, items: list[int]) -> None:
        """Leave out the re-runs that make these items for nobody, and what ran again for them."""
        moments, todo = self.moments, list(items)
        while todo:
            i = todo.pop()
            mine = moments.pieces.made[moments.maker[i]]
            for key in moments.made[i][1:]:
                if not any(moments.is_read(each, key) for each in mine):
                    self._remove(key)
                    todo += moments.reads[moments.maker[i]]

    def _add(self, key: int) -> None:
        self.moments.add(key)
        self.changes.append((True, key))
        self.changed += 1

    def _remove(self, key: int) -> None:
        self.moments.remove(key)
        self.changes.append((False, key))
        self.changed += 1


def _exp(x: float) -> float:
    """Nearly exp(-x), by sums and products alone: the same on every machine."""
    power = max(0.0, 1.0 - x / 64)
    for _ in range(6):
        power *= power
    return power
