"""Plan for a deep budget: cut backward where a plan breaks the budget, and decide at each cut what to keep.

    no cut        bound 3.87 %   its plan is over the budget at 3150
    cut at 3150   bound 3.96 %   over at 2864
    ...
    five cuts     bound 5.82 %   5.82 %, fits

Within a phase a value is recomputed when it is first read.  It stays until it is last read, or to the end of the phase
if the next one keeps it.  The simulator finds where that breaks the budget; a cut there adds a row of memory.
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
from ..lp.linear_program import INFINITY
from ..lp.problem import PlanProblem
from ..lp.solver import SearchLimits, Solution
from ..schedule.recompute_order import RecomputeOrder
from ..simulate.forecast import Forecast, predict
from ..simulate.plan_result import Proposal
from .phase_lp import PhaseModel, PhaseProblem

ROUNDS = 8
GAP = 0.004  # of the step: a gap at which the search ends
COARSE_GAP = 0.012  # of the step: what a search leaves while no plan fits
WORK_PER_OP = 4_000  # of all searches together; see `LPSolver.work`
NODES = 2_000
APART = 6  # positions nearer to a cut than this have nearly the same rows


def cut_backward(trace: Trace, machine: Machine, until: float = math.inf) -> Proposal:
    """Return the fastest plan found that fits and only recomputes, and the bound of all such plans.

    There are no decisions if none fits.  The search ends at `until`, as `time.monotonic` has it.
    """
    if not solver.is_installed():
        return Proposal(())
    program = PlanProblem(ReuseGaps(trace), machine.without_tier)
    if program.least_nbytes > machine.budget:
        return Proposal(())
    found = _PhaseSearch(program, until).run()
    return replace(found, any_us=0.0, no_offload_us=found.any_us) if machine.link.out else found


class _PhaseSearch:
    """The cuts so far, the best plan, and its bound."""

    def __init__(self, program: PlanProblem, until: float) -> None:
        self.problem = program
        self.budget = program.machine.budget
        self.room = self.budget  # what the rows leave; if less, nothing is proven
        self.until = until
        self.phase_problem = PhaseProblem(program, self.budget)
        self.recomputable = frozenset(
            s for s, op in program.gaps.producer.items() if not program.gaps.trace.op[op].once
        )
        self.cuts: tuple[int, ...] = ()
        self.work = WORK_PER_OP * program.size
        self.abs_gap = COARSE_GAP
        self.plan: Plan = ()
        self.us = INFINITY
        self.any_us = 0.0

    def run(self) -> Proposal:
        for _ in range(ROUNDS):
            if self.work <= 0 or time.monotonic() >= self.until or self._is_near():
                break
            phases = PhaseModel(self.phase_problem, self.room, self.cuts, self.until)
            points = self._solve(phases)
            if not points:
                break
            forecasts = [self._simulate(phases, point) for point in points]
            if forecasts[0].peak <= self.budget:
                if self.abs_gap < COARSE_GAP:
                    break
                self.abs_gap = GAP
            else:
                self._cut(forecasts[0])
        return Proposal(self.plan, any_us=self.any_us)

    def _is_near(self) -> bool:
        step_us = self.problem.captured.us
        return self.us <= (step_us + self.any_us) * (1 + GAP)

    def _solve(self, phases: PhaseModel) -> list[Solution]:
        """Return integer solutions, and take what they prove."""
        relaxed = phases.solve()
        if relaxed is None:
            return []
        effort = SearchLimits(-INFINITY, INFINITY, self.abs_gap * self.problem.captured.us, self.work, NODES)
        points, bound_us = phases.solve_integers(effort)
        self.work -= phases.lp.search_work
        if self.room == self.budget:
            self.any_us = max(self.any_us, relaxed.us, bound_us if points else 0.0)
        return points

    def _simulate(self, phases: PhaseModel, point: Solution) -> Forecast:
        """Simulate the plan of a solution; keep it if it is the fastest that fits so far."""
        plan = self._plan(phases, point)
        forecast = predict(apply(self.problem.gaps.trace, plan), self.problem.machine)
        if forecast.peak <= self.budget and forecast.us < self.us:
            self.plan, self.us = plan, forecast.us
        return forecast

    def _plan(self, phases: PhaseModel, point: Solution) -> Plan:
        gaps, reruns, size = self.problem.gaps, RecomputeOrder(self.problem.gaps, self.recomputable), len(phases.ends)
        held = [*(phases.kept_storages(point, q) for q in range(size)), frozenset[str]()]
        for q, (begin, end) in enumerate(zip(phases.starts, phases.ends, strict=True)):
            reruns.drop(held[q])
            reads = [i for i in gaps.reads if begin <= i <= end]
            wanted = held[q + 1].union(*(gaps.holds[value] for i in reads for value in gaps.reads[i]))
            for i in sorted({*reads, end}):
                if i == end:
                    reruns.recompute(
                        [reruns.whole_value(s) for s in sorted(held[q + 1] & self.recomputable)], end, wanted
                    )
                reruns.recompute(gaps.reads.get(i, ()), i, wanted)
        return tuple(reruns.decisions)

    def _cut(self, forecast: Forecast) -> None:
        """Cut where the step is most over the budget; if it is cut there already, lower the budget of all rows."""
        places, ops = self.problem.gaps.trace.index, self.problem.gaps.trace.ops
        found, position = [(False, 0, 0)], self.problem.size - 1
        for index in reversed(range(len(forecast.trace.ops))):
            name, nbytes = forecast.trace.ops[index].name, int(forecast.total[index])
            position = places.get(name, position)
            # A recomputation before an op counts for the position of the op before it.
            place = position - (ops[position].name != name)
            if nbytes > self.budget and self._may_cut(place):
                found.append((all(abs(place - cut) > APART for cut in self.cuts), nbytes, place))
        place = max(found)[2]
        if place:
            self.cuts = tuple(sorted((*self.cuts, place)))
        else:
            self.room -= forecast.peak - self.budget

    def _may_cut(self, place: int) -> bool:
        return self.problem.boundary <= place < self.problem.size - 1 and place not in self.cuts
