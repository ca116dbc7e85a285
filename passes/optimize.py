"""Plans near the optimum, and the proof how near: relax, round, simulate, repair.

    bound 12.39 %   ->   whole 12.82 %, over the budget at two positions   ->   their rows   ->   12.83 %, fits

The simulator has the last word.  A position that it finds over the budget gets its rows; if it has them, what a re-run
takes while it runs is the reason, and an event's row says so.  From then on the program's objective is no bound.
"""

from __future__ import annotations

from dataclasses import replace

from . import linear
from .choice import Choice, Proposal
from .events import event
from .forecast import Forecast
from .gaps import Gaps
from .greedy import State, descend_from, state_of
from .linear import INFINITY, Solved
from .machine import Machine
from .model import Model
from .program import Program
from .relax import apart, relax, write
from .trace import Trace
from .whole import Effort, fates, whole

ENOUGH = 0.005  # of the step: a gap at which the search ends
NOTHING_US = 20.0  # microseconds a step that nobody searches for
AIM = 0.8  # of this gap, so that a repair may cost something
REPAIRS = 8
POSITIONS = 12  # that get their rows at once
# Thresholds as shares of the step, and whether a point that misses the aim is mended: a wider search is better.
EFFORTS = ((-INFINITY, False), (1e-4, False), (5e-4, False), (1e-3, True), (INFINITY, True))
NODES = 200
LARGE = 5_000  # columns: of more the search with nothing fixed takes too long
FEW = 1_000  # ops: with fewer a search takes no less
WORK_PER_OP = 400_000  # of all searches of a pass together; see `Linear.work`


def optimize(trace: Trace, machine: Machine, until: float = INFINITY) -> Proposal:
    """The best plan found in which every value runs again or is sent away at most once; no decisions, if none fits.

    The search ends at `until`, as `time.monotonic` has it; without it, it does not depend on the clock.
    """
    if not linear.there():
        return Proposal(())
    program = Program(Gaps(trace), machine)
    return _Search(program, machine, until).run()


def optimize_at_home(trace: Trace, machine: Machine, until: float = INFINITY) -> Proposal:
    """The same without the far tier; what is proven of that says nothing of plans that use it."""
    if not machine.out:
        return Proposal(())
    return Proposal(optimize(trace, replace(machine, out=0.0, back=0.0), until).plan)


def optimize_uncast(trace: Trace, machine: Machine, until: float = INFINITY) -> Proposal:
    """The same with nothing cast for its way; what is proven of that says nothing of plans that cast."""
    if not (machine.wire and machine.out):
        return Proposal(())
    return Proposal(optimize(trace, replace(machine, wire=""), until).plan)


class _Search:
    """The best plan so far, and what is proven."""

    def __init__(self, program: Program, machine: Machine, until: float) -> None:
        self.program = program
        self.machine = machine
        self.model = Model(program, machine.budget, until)
        self.step_us = program.captured.us
        self.work = WORK_PER_OP * max(FEW, program.size)
        self.best: Choice | None = None
        self.bound_us = self.any_us = 0.0
        self.relaxed: Solved
        self.rows = 0  # that the relaxed point keeps
        self.events: list[int] = []  # rows that are no part of a proof

    def run(self) -> Proposal:
        relaxed = relax(self.model)
        if relaxed is None:
            return Proposal(())
        self.any_us = relaxed.any_us
        if relaxed.solved is None:
            return Proposal((), any_us=self.any_us)
        self.relaxed, self.rows = relaxed.solved, self.model.linear.rows
        self._prove(relaxed.solved.us)
        for share, patient in EFFORTS:
            self._round(share * self.step_us, patient)
            if self._is_near():
                break
        return Proposal(self.best.plan if self.best else (), self.bound_us, self.any_us)

    def _prove(self, us: float) -> None:
        if not self.events:
            self.bound_us = max(self.bound_us, us - self.model.tie)

    def _is_near(self) -> bool:
        if self.best is None:
            return False
        best = replace(self.best, bound_us=self.bound_us, any_us=self.any_us)
        return best.forecast.us - best.lower_bound <= max(ENOUGH * best.lower_bound, NOTHING_US)

    @property
    def _target(self) -> float:
        return self.bound_us + AIM * max(ENOUGH * (self.step_us + self.bound_us), NOTHING_US)

    def _effort(self, threshold: float) -> Effort | None:
        """How hard to search, if a search ends in time: nothing fixed takes too long where there is much."""
        left = self.work - self.model.linear.work
        large = threshold == INFINITY and len(self.model.linear.costs) > LARGE
        return Effort(threshold, NODES, left) if left > 0 and not large else None

    def _round(self, threshold: float, patient: bool) -> None:
        """Round and repair, until a plan fits or nothing is left to mend."""
        for _ in range(REPAIRS):
            effort = self._effort(threshold)
            if effort is None or not self._relax_again():
                break
            point, bound = whole(self.model, self.relaxed, effort, self._target)
            if threshold == INFINITY > bound:
                self._prove(bound)
            if point is None:
                break
            state = state_of(self.program.gaps, self.machine, fates(self.model, point))
            near = patient or point.us <= self._target
            if self._take(state) or not near or self._mend(state):
                break
        self._forget_events()

    def _relax_again(self) -> bool:
        """Bring the relaxed point up to date with rows written since; whether there is one."""
        if self.rows != self.model.linear.rows:
            solved = self.model.linear.solve()
            if solved is None:
                return False
            self.relaxed, self.rows = solved, self.model.linear.rows
            self._prove(solved.us)
        return True

    def _mend(self, state: State) -> bool:
        """Whether what the greedy pass makes of the plan is near enough; if not, what breaks the budget gets rows."""
        self._take(descend_from(self.program.gaps, self.machine, state))
        over = sorted(_over(self.program, state.forecast, self.machine.budget), key=lambda found: -found[1])
        new = [position for position, _, _ in over if position not in self.model.written]
        for position in apart(new, POSITIONS):
            write(self.model, position)
        if not new:
            self.events += [event(self.model, state.forecast, index, position) for position, _, index in over]
        return self._is_near()

    def _take(self, state: State) -> bool:
        """Whether a plan fits; it is kept if it is the best so far."""
        if state.peak > self.machine.budget:
            return False
        if self.best is None or state.forecast.us < self.best.forecast.us:
            self.best = Choice(state.plan, self.program.captured, state.forecast)
        return True

    def _forget_events(self) -> None:
        for row in self.events:
            self.model.linear.bound_row(row, INFINITY)
        if self.events:
            self.rows = 0  # the point may be another without them
        self.events.clear()


def _over(program: Program, forecast: Forecast, budget: int) -> list[tuple[int, int, int]]:
    """The positions of the captured trace at which, or just before which, the step is over the budget; its bytes
    there, and the index in the step as it runs."""
    places, worst = program.gaps.index, dict[int, tuple[int, int, int]]()
    position = program.size - 1
    for index in reversed(range(len(forecast.trace.ops))):
        position = places.get(forecast.trace.ops[index].name, position)
        nbytes = int(forecast.total[index])
        if nbytes > max(budget, worst.get(position, (0, 0))[1]):
            worst[position] = position, nbytes, index
    return list(worst.values())
