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
from .relax import EVERY, WINDOW, relax, write
from .trace import Trace
from .whole import Effort, fates, whole

ENOUGH = 0.005  # of the step: a gap at which the search ends
NOTHING_US = 20.0  # microseconds a step that nobody searches for
FAIR = 0.01  # a gap at which it ends after the first few tries
AIM = 0.8  # of this gap, so that a repair may cost something
REPAIRS = 8
LADDER = ((WINDOW, 12), (3 * WINDOW, 4), (EVERY, 2))  # how many makers rows look at, of how many positions at once
EFFORTS = (
    (1e-4, 200, WINDOW),
    (1e-3, 200, WINDOW),
    (1e-3, 100, EVERY),
)  # threshold as a share of the step, nodes, makers a row looks at
THOROUGH = 200  # nodes of the search with nothing fixed
LARGE = 5_000  # columns: above, nothing fixed takes too long
WORK = 25_000  # of all searches together, some seconds; see `Linear.work`
PURE = 3  # points in a round, after which rows are written that are part of no proof


def optimize(trace: Trace, machine: Machine) -> Proposal:
    """The best plan found in which every value runs again or is sent away at most once; no decisions, if none fits."""
    if not linear.there():
        return Proposal(())
    program = Program(Gaps(trace), machine)
    return _Search(program, machine).run()


def optimize_at_home(trace: Trace, machine: Machine) -> Proposal:
    """The same without the far tier; what is proven of that says nothing of plans that use it."""
    if not machine.out:
        return Proposal(())
    return Proposal(optimize(trace, replace(machine, out=0.0, back=0.0)).plan)


class _Search:
    """The best plan so far, and what is proven."""

    def __init__(self, program: Program, machine: Machine) -> None:
        self.program = program
        self.machine = machine
        self.model = Model(program, machine.budget)
        self.step_us = program.captured.us
        self.best: Choice | None = None
        self.bound_us = self.any_us = 0.0
        self.events: list[int] = []  # rows that are no part of a proof

    def run(self) -> Proposal:
        relaxed = relax(self.model)
        if relaxed is None:
            return Proposal(())
        self.any_us = relaxed.any_us
        if relaxed.solved is None:
            return Proposal((), any_us=self.any_us)
        self._prove(relaxed.solved.us)
        for share, nodes, window in EFFORTS:
            for position in list(self.model.windows):
                write(self.model, position, window)
            self._round(Effort(share * self.step_us, nodes))
            if self._is_near(FAIR):
                break
        if not self._is_near(ENOUGH):
            self._be_thorough()
        return Proposal(self.best.plan if self.best else (), self.bound_us, self.any_us)

    def _prove(self, us: float) -> None:
        if not self.events:
            self.bound_us = max(self.bound_us, us - self.model.tie)

    def _is_near(self, gap: float) -> bool:
        if self.best is None:
            return False
        best = self._proven(self.best)
        return best.forecast.us - best.lower_bound <= max(gap * best.lower_bound, NOTHING_US)

    def _proven(self, choice: Choice) -> Choice:
        return replace(choice, bound_us=self.bound_us, any_us=self.any_us)

    @property
    def _target(self) -> float:
        return self.bound_us + AIM * max(ENOUGH * (self.step_us + self.bound_us), NOTHING_US)

    def _round(self, effort: Effort) -> None:
        """Round and repair, until a plan fits or nothing is left to mend."""
        for turn in range(REPAIRS):
            relaxed = self.model.linear.solve()
            if relaxed is None or self.model.linear.work > WORK:
                break
            self._prove(relaxed.us)
            point, _ = whole(self.model, relaxed, effort, self._target)
            if point is None or self._judge(point, turn < PURE - 1):
                break
        self._forget_events()

    def _be_thorough(self) -> None:
        """Search with nothing fixed: what it proves is a bound of the class."""
        if len(self.model.linear.costs) > LARGE or self.model.linear.work > WORK:
            return
        relaxed = self.model.linear.solve()
        if relaxed is not None:
            effort = Effort(float("inf"), THOROUGH)
            point, bound = whole(self.model, relaxed, effort, self._target)
            if bound < float("inf"):
                self._prove(bound)
            if point is not None and not self._judge(point, True):
                self._round(Effort(EFFORTS[-1][0] * self.step_us, THOROUGH))

    def _judge(self, point: Solved, pure: bool) -> bool:
        """Whether the plan of a point fits; if not, what breaks the budget gets rows."""
        gaps, machine = self.program.gaps, self.machine
        state = state_of(gaps, machine, fates(self.model, point))
        if self._take(state):
            return True
        self._take(descend_from(gaps, machine, state))
        forecast = state.forecast
        over = sorted(_over(self.program, forecast, self.machine.budget), key=lambda found: -found[1])
        wrote = self._write_rows([position for position, _, _ in over])
        if not (wrote and pure):
            self.events += [event(self.model, forecast, index, position) for position, _, index in over]
        return self._is_near(ENOUGH if pure else FAIR)

    def _take(self, state: State) -> bool:
        """Whether a plan fits; it is kept if it is the best so far."""
        if state.peak > self.machine.budget:
            return False
        if self.best is None or state.forecast.us < self.best.forecast.us:
            self.best = Choice(state.plan, self.program.captured, state.forecast)
        return True

    def _write_rows(self, positions: list[int]) -> bool:
        """Rows for positions that have none, or rows that look at more makers; whether there were any to write."""
        for window, count in LADDER:
            if sum(write(self.model, position, window) for position in positions[:count]):
                return True
        return False

    def _forget_events(self) -> None:
        for row in self.events:
            self.model.linear.bound_row(row, INFINITY)
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
