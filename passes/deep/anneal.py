"""Plan for a deep budget by annealing: add, move and remove recomputations by chance, beginning with none.

    no recomputations, 865 MB over the budget   ->   {b before 8, c before 9, b before 9, ...}, fits

A change is kept if the step gets better by it, or by chance if not much worse.  The chance falls as it cools, and bytes
over the budget weigh more and more.  A change frees a storage at a moment and recomputes it for its next reader; drops
a recomputation; moves it next to others that make what it reads or read what it makes; or drops it and frees other
storages instead.  A recomputation that nothing reads any more is dropped as well.

What forward keeps is decided while it is hot, by chance.  So many runs begin, and the best go on.
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
from ..lp.linear_program import INFINITY
from ..lp.problem import PlanProblem
from ..simulate.forecast import predict
from .phase_lp import PhaseProblem
from .rerun_state import RerunState

ROUNDS = (12, 12), (4, 20), (1, 32)  # runs that are cooled, and the tries of each per storage
MOST_STORAGES = 128  # more storages get no more tries
REPAIRS = 3
START_HEAT = 2.0  # in the mean time of a recomputation
COOLING = 2.3  # to a tenth
START_PENALTY = 0.4  # of a byte over the budget, in the mean time of recomputing a byte; it rises a hundredfold
KEEP_CHANCES = (0.0, 0.3, 1.0)  # that what a recomputation reads is kept until then, not recomputed as well
SWAP, MOVE, LEAVE = 0.12, 0.32, 0.75  # up to which chance a change is one of these
EAGER = 0.25  # more chance to free a storage while the step is over the budget
TRIES_TO_RELEASE = 20  # to find a storage that may be freed
RELEASES_PER_SWAP = 3  # storages that are freed for a recomputation that is dropped
CHANGES = 16  # of a try on average: with more, it cools in fewer tries
PER_LOOK = 64  # tries between two looks at the clock


def anneal(trace: Trace, machine: Machine, until: float = INFINITY) -> Plan:
    """Return the fastest plan found that fits and only recomputes; no decisions if none fits.

    It ends at `until`, as `time.monotonic` has it.  Without HiGHS only the greedy pass plans, which is quick.
    """
    if not solver.is_installed():
        return ()
    machine = machine.without_tier
    problem = PlanProblem(ReuseGaps(trace), machine)
    if problem.least_nbytes > machine.budget:
        return ()
    rng_nbytes = [nbytes for _, nbytes, _ in problem.rng_draws]  # there from forward on, and twice while they are set
    room = machine.budget - sum(rng_nbytes) - 2 * max(rng_nbytes, default=0)
    for _ in range(REPAIRS):
        state = _anneal(PhaseProblem(problem, machine.budget), room, until)
        plan = state.plan() if state else ()
        peak = predict(apply(trace, plan), machine).peak
        if peak <= machine.budget:
            return plan
        if state is None:
            break
        room -= peak - machine.budget  # of negligible storages
    return ()


def _anneal(phase_problem: PhaseProblem, room: int, until: float) -> RerunState | None:
    """Return the best recomputations found that fit; None if none do."""
    runs = [_Annealing(RerunState(phase_problem, room), seed, until) for seed in range(ROUNDS[0][0])]
    for count, tries in ROUNDS:
        runs = sorted(runs, key=lambda each: each.best_us)[:count]
        for each in runs:
            each.cool(tries * min(len(phase_problem.storages), MOST_STORAGES))
    best = min(runs, key=lambda each: each.best_us)
    return RerunState(phase_problem, room).with_reruns(best.best) if best.best_us < INFINITY else None


class _Annealing:
    """One run, and the best recomputations that it found."""

    def __init__(self, state: RerunState, seed: int, until: float) -> None:
        self.state = state
        self.random = random.Random(seed)
        self.until = until
        producers, produced = state.problem.producers, state.phase_problem.producers
        recomputable = [o for o in produced if not producers[o].runs_once]
        self.run_once = frozenset(o for o in produced if producers[o].runs_once)
        self.storages = [i for o in recomputable for i in produced[o]]
        self.us = sum(producers[o].us for o in recomputable) / max(1, len(recomputable)) or 1.0  # of one recomputation
        self.us_per_byte = self.us * len(self.storages) / max(1, sum(state.nbytes[i] for i in self.storages))
        self.changes: list[tuple[bool, int]] = []  # of a try: whether it was added, and its key
        self.change_count = 0
        self.best: tuple[int, ...] = ()
        self.best_us = INFINITY

    def cool(self, tries: int) -> None:
        """Heat up, and cool in so many tries, or in fewer that change much."""
        us, over = self.state.us, self.state.total_excess
        first_count, tried, done = self.change_count, 0, 0.0
        while self.storages and done < 1.0:
            if tried % PER_LOOK == 0 and self.until < INFINITY and time.monotonic() >= self.until:
                return
            cold = _exp(COOLING * done)
            self.changes.clear()
            self.state.save()
            self._change(over > 0)
            new = self.state.total_excess
            worse = self.state.us - us + self.us_per_byte * START_PENALTY / (cold * cold) * (new - over)
            if worse > 0 and self.random.random() >= _exp(worse / (self.us * START_HEAT * cold)):
                self.state.restore(self.changes)
            else:
                us, over = self.state.us, new
                if not over and us < self.best_us:
                    self.best, self.best_us = tuple(self.state.reruns), us
            tried += 1
            done = max(tried / tries, (self.change_count - first_count) / (CHANGES * tries))

    def _change(self, is_over: bool) -> None:
        kind, reruns = self.random.random(), self.state.reruns
        leave = LEAVE - EAGER * is_over
        if not reruns or kind > leave:
            self._release(self._pick_moment(is_over))
        elif kind < SWAP:
            self._swap()
        elif kind < MOVE:
            self._move(self._pick(reruns))
        else:
            self._drop_rerun(self._pick(reruns))

    def _pick_moment(self, is_over: bool) -> int:
        """Return the key of a moment, over the budget if there are such."""
        if is_over:
            places = (self.state.excess > 0).nonzero()[0]
            return self.state.keys[int(places[int(self.random.random() * len(places))])]
        return self._pick(self.state.keys)

    def _pick(self, keys: list[int]) -> int:
        return keys[int(self.random.random() * len(keys))]

    def _release(self, at: int) -> None:
        """Free a storage at a moment that does not read it, and recompute it for its next reader."""
        state = self.state
        for _ in range(TRIES_TO_RELEASE):
            i = self._pick(self.storages)
            uses, made = state.uses[i], state.versions[i]
            place = bisect_right(uses, at)
            if place == len(uses) or (place and uses[place - 1] == at):
                continue
            begin = made[bisect_left(made, uses[place]) - 1]
            position = uses[place] // state.stride
            if begin < at and max(begin, uses[place - 1] if place else 0) // state.stride < position:
                self._recompute(state.producer[i], position, self._keep_chance())
                return

    def _keep_chance(self) -> float:
        return KEEP_CHANCES[int(self.random.random() * len(KEEP_CHANCES))]

    def _recompute(self, o: int, position: int, keep_chance: float) -> None:
        """Recompute an op before another one, and what it reads, unless that is there or by chance kept until then."""
        state, todo = self.state, [o]
        while todo:
            w = todo.pop()
            key = position * state.stride + w
            if not state.has(key):
                self._add(key)
                absent = (i for i in state.reads[w] if self._is_absent(i, key))
                todo += [state.producer[i] for i in absent if self.random.random() >= keep_chance]

    def _is_absent(self, i: int, key: int) -> bool:
        """Return True if a storage waits for one recomputation alone, and can be recomputed itself."""
        state = self.state
        uses, made = state.uses[i], state.versions[i]
        begin, after = bisect_left(made, key), bisect_right(uses, key)
        if after < len(uses) and (begin == len(made) or uses[after] < made[begin]):
            return False
        before = max(made[begin - 1], uses[after - 2] if after > 1 else 0)
        return before // state.stride < key // state.stride and state.producer[i] not in self.run_once

    def _drop_rerun(self, key: int) -> None:
        """Drop a recomputation."""
        self._remove(key)
        self._prune(self.state.reads[key % self.state.stride])

    def _move(self, key: int) -> None:
        """Move a recomputation to another position."""
        state, o = self.state, key % self.state.stride
        neighbours: set[int] = set()
        for i in (*state.reads[o], *state.phase_problem.producers[o]):
            place = bisect_left(state.uses[i], key)
            neighbours.update(state.uses[i][max(0, place - 2) : place + 3])
            place = bisect_left(state.versions[i], key)
            neighbours.update(state.versions[i][max(1, place - 1) : place + 2])
        positions = {each // state.stride for each in neighbours} - {key // state.stride}
        if places := sorted(position for position in positions if position >= state.problem.boundary):
            self._remove(key)
            self._recompute(o, self._pick(places), self._keep_chance())
            self._prune([*state.reads[o], *state.phase_problem.producers[o]])

    def _swap(self) -> None:
        """Drop a recomputation, and free storages where the step is fullest, while more is over the budget."""
        before = self.state.total_excess
        self._drop_rerun(self._pick(self.state.reruns))
        for _ in range(RELEASES_PER_SWAP):
            if self.state.total_excess <= before:
                break
            self._release(self.state.keys[int(self.state.excess.argmax())])

    def _prune(self, storages: list[int]) -> None:
        """Drop recomputations that make these storages for no reader, and those that these read."""
        state, todo = self.state, list(storages)
        while todo:
            i = todo.pop()
            produced = state.phase_problem.producers[state.producer[i]]
            for key in state.versions[i][1:]:
                if not any(state.is_read(each, key) for each in produced):
                    self._remove(key)
                    todo += state.reads[state.producer[i]]

    def _add(self, key: int) -> None:
        self.state.add(key)
        self.changes.append((True, key))
        self.change_count += 1

    def _remove(self, key: int) -> None:
        self.state.remove(key)
        self.changes.append((False, key))
        self.change_count += 1


def _exp(x: float) -> float:
    """Approximate exp(-x) by sums and products, which are the same on every machine."""
    power = max(0.0, 1.0 - x / 64)
    for _ in range(6):
        power *= power
    return power
