"""Cut backward where a plan breaks the budget, and decide at each cut anew what stays: the plan for deep budgets.

    no cut        bound 3.87 %   its plan is over the budget at 3150
    cut at 3150   bound 3.96 %   over at 2864
    ...
    five cuts     bound 5.82 %   5.82 %, fits

Within a phase a value is made when it is first read, and stays until it is last read, or until the phase ends if the
next one begins with it.  The simulator says what that comes to; a cut is a row of memory where it breaks the budget.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Plan, apply
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..lp import solver
from ..lp.problem import PlanProblem
from ..lp.solver import INFINITY, SearchLimits, Solution
from ..schedule.recompute_order import RecomputeOrder
from ..simulate.forecast import Forecast, predict
from ..simulate.plan_result import Proposal
from .phase_lp import Phases, Pieces

ROUNDS = 8
ENOUGH = 0.004  # of the step: a gap at which the search ends
COARSE = 0.012  # of the step: what a search leaves as long as no plan fits
WORK_PER_OP = 4_000  # of all searches together; see `LPSolver.work`
NODES = 2_000
APART = 6  # positions nearer to a cut than this say much the same


def cut_backward(trace: Trace, machine: Machine, until: float = math.inf) -> Proposal:
    """The quickest plan found that fits and recomputes only, and what is proven of all that do; no decisions, if none
    fits.  At `until`, as `time.monotonic` has it, it ends with what was found.
    """
    if not solver.is_installed():
        return Proposal(())
    program = PlanProblem(ReuseGaps(trace), machine.without_tier)
    if program.floor.max(initial=0.0) > machine.budget:
        return Proposal(())
    found = _Search(program, until).run()
    return replace(found, any_us=0.0, no_offload_us=found.any_us) if machine.link.out else found


class _Search:
    """The cuts so far, the best plan, and what is proven."""

    def __init__(self, program: PlanProblem, until: float) -> None:
        self.program = program
        self.budget = program.machine.budget
        self.room = self.budget  # what the rows leave; if less, nothing is proven
        self.until = until
        self.pieces = Pieces(program, self.budget)
        self.made = frozenset(s for s, op in program.gaps.producer.items() if not program.gaps.trace.op[op].once)
        self.cuts: tuple[int, ...] = ()
        self.work = WORK_PER_OP * program.size
        self.grain = COARSE
        self.plan: Plan = ()
        self.us = INFINITY
        self.any_us = 0.0

    def run(self) -> Proposal:
        for _ in range(ROUNDS):
            if self.work <= 0 or time.monotonic() >= self.until or self._is_near():
                break
            phases = Phases(self.pieces, self.room, self.cuts, self.until)
            points = self._whole(phases)
            if not points:
                break
            forecasts = [self._take(phases, point) for point in points]
            if forecasts[0].peak <= self.budget:
                if self.grain < COARSE:
                    break
                self.grain = ENOUGH
            else:
                self._cut(forecasts[0])
        return Proposal(self.plan, any_us=self.any_us)

    def _is_near(self) -> bool:
        step_us = self.program.captured.us
        return self.us <= (step_us + self.any_us) * (1 + ENOUGH)

    def _whole(self, phases: Phases) -> list[Solution]:
        """Whole points, and what they prove."""
        relaxed = phases.solve()
        if relaxed is None:
            return []
        effort = SearchLimits(-INFINITY, INFINITY, self.grain * self.program.captured.us, self.work, NODES)
        points, bound_us = phases.whole(effort)
        self.work -= phases.linear.search_work
        if self.room == self.budget:
            self.any_us = max(self.any_us, relaxed.us, bound_us if points else 0.0)
        return points

    def _take(self, phases: Phases, point: Solution) -> Forecast:
        """What a point comes to; its plan is kept if it is the best that fits so far."""
        plan = self._written(phases, point)
        forecast = predict(apply(self.program.gaps.trace, plan), self.program.machine)
        if forecast.peak <= self.budget and forecast.us < self.us:
            self.plan, self.us = plan, forecast.us
        return forecast

    def _written(self, phases: Phases, point: Solution) -> Plan:
        """The decisions of a point."""
        gaps, reruns, size = self.program.gaps, RecomputeOrder(self.program.gaps, self.made), len(phases.ends)
        held = [*(phases.held(point, q) for q in range(size)), frozenset[str]()]
        for q, (begin, end) in enumerate(zip(phases.begins, phases.ends, strict=True)):
            reruns.drop(held[q])
            reads = [i for i in gaps.reads if begin <= i <= end]
            wanted = held[q + 1].union(*(gaps.holds[value] for i in reads for value in gaps.reads[i]))
            for i in sorted({*reads, end}):
                if i == end:
                    reruns.recompute([reruns.whole_value(s) for s in sorted(held[q + 1] & self.made)], end, wanted)
                reruns.recompute(gaps.reads.get(i, ()), i, wanted)
        return tuple(reruns.decisions)

    def _cut(self, forecast: Forecast) -> None:
        """Cut where the step is most over the budget; if it is cut there, every row leaves as much room as it lacks."""
        places, ops = self.program.gaps.index, self.program.gaps.trace.ops
        found, position = [(False, 0, 0)], self.program.size - 1
        for index in reversed(range(len(forecast.trace.ops))):
            name, nbytes = forecast.trace.ops[index].name, int(forecast.total[index])
            position = places.get(name, position)
            # What is over while something runs again before an op is over behind the op before it.
            place = position - (ops[position].name != name)
            if nbytes > self.budget and self._may_cut(place):
                found.append((all(abs(place - cut) > APART for cut in self.cuts), nbytes, place))
        place = max(found)[2]
        if place:
            self.cuts = tuple(sorted((*self.cuts, place)))
        else:
            self.room -= forecast.peak - self.budget

    def _may_cut(self, place: int) -> bool:
        return self.program.boundary <= place < self.program.size - 1 and place not in self.cuts
