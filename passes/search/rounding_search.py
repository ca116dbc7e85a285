"""Round, simulate, repair: from a relaxed solution of the linear program to a plan that fits.

    bound 12.39 %   ->   rounded 12.82 %, over the budget at two positions   ->   their rows   ->   12.83 %, fits

The simulator has the last word.  A position that it finds over the budget gets its rows.  If it has them, a
recomputation takes the bytes while it runs; the greedy pass alone can repair that.

The best plan of a search so far, and what is proven of all plans.

a solution, rounded and simulated: 12.83 %, fits; proven: 12.39 %   ->   is_near(), and the search ends
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property

from ..lp.linear_program import INFINITY
from ..lp.model import RELOADS, PlanModel
from ..lp.problem import PlanProblem
from ..lp.relax import ROUNDS, Relaxed, relax, spread_out
from ..lp.rounding import placements, round_to_integers
from ..lp.solver import SearchLimits, Solution
from ..schedule.candidate import Candidate, make_candidate
from ..schedule.copy_timing import retime_copies
from ..schedule.schedule import Placement
from ..simulate.bound_proof import BoundProof, BoundProofs
from ..simulate.forecast import Forecast
from ..simulate.plan_result import PlanResult
from .greedy import greedy_from
from .work import WorkLimits

AIM = 0.8  # of a near gap: the rest is left to repairs
POSITIONS = 12  # that get their rows in one repair
SMALL = 1_000  # columns: with fewer a search need not end early
REPAIRS = 8
ABS_GAP = 0.001  # of the step: what a search with fixed columns leaves
GAP = 0.005  # of the step: a gap at which the search ends
FAIR_GAP = 0.02  # of the step: a gap above which a plan is also sought from the one without offload
NEGLIGIBLE_US = 20.0  # microseconds of a step that no search is worth


@dataclass(frozen=True)
class RepairLimits:
    """Limits of repairing plans that do not fit, with the greedy pass.

    Attributes:
        ops: of all plans that are repaired beside the best, in one round.
        only_last: True to repair only in the last search, and only if nothing fits yet.
        simulated: ops that the greedy pass may simulate for one plan.
    """

    ops: int = 1_500
    only_last: bool = False
    simulated: float = INFINITY


class RoundingSearch:
    """A linear program, its relaxed solution, and the plans that come of rounding it.

    Attributes:
        charges_reloads: True if recomputations pay for the reloads of state that they read, which no proof counts.
    """

    def __init__(
        self, problem: PlanProblem, until: float, work: WorkLimits, repair: RepairLimits = RepairLimits()
    ) -> None:
        self.problem = problem
        self.machine = problem.machine
        self.until = until
        self.work = work
        self.repair = repair
        self.model = PlanModel(problem, self.machine.budget, until)
        self.incumbent = Incumbent(problem, self.model.columns.tie_us)
        self.step_us = problem.captured.us
        self.relaxed: Solution
        self.best_solution: Solution | None = None  # of the best plan: the next search begins with it
        self.solved_rows = 0  # rows that the relaxed solution keeps
        self.reload_rows: list[int] = []  # rows that are no part of a proof
        self.charges_reloads = not problem.states

    def start(self, relax_work: float = INFINITY, rounds: int = ROUNDS) -> Relaxed | None:
        """Solve the relaxed program, and take what it proves; None if no plan fits, as far as is known."""
        relaxed = relax(self.model, relax_work, rounds)
        if relaxed is None:
            return None
        self.incumbent.any_us, self.incumbent.proofs = relaxed.any_us, BoundProofs(any_plan=relaxed.any_proof)
        if relaxed.solution is None:
            return None
        self.relaxed, self.solved_rows = relaxed.solution, self.model.lp.row_count
        self.incumbent.bound_us = 0.0
        self.incumbent.prove(relaxed.solution.us, relaxed.proof)
        return relaxed

    def round(self, threshold: float, last: bool) -> None:
        """Round and repair, until a plan fits or nothing is left to repair.

        Columns stay fixed that cost more than `threshold` microseconds to change.  Unless it is the `last` search, a
        solution that misses the aim is not repaired: a wider search follows, which is better.
        """
        if self.reload_rows and threshold < INFINITY and not self.charges_reloads:
            self.charge_reloads()
        for _ in range(REPAIRS):
            limits = self._limits(threshold, last)
            if limits is None or time.monotonic() >= self.until or not self._update_relaxed():
                break
            # A solution that is good enough already would end the search, though its plan is not.
            start = self.best_solution
            start = start if start and start.us > limits.target else None
            solutions, bound_us = round_to_integers(self.model, self.relaxed, threshold, limits, start)
            if threshold == INFINITY > bound_us:
                self._prove(bound_us)
            if not solutions:
                break
            repairs = last or solutions[0].us <= limits.target
            if not self._simulate(solutions, threshold, repairs, last):
                break
        self._drop_reload_rows()

    def charge_reloads(self) -> bool:
        """Let recomputations pay for reloads of the state that they read; return True if any reads some."""
        self.reload_rows = self.reload_rows or self.model.rows.add(RELOADS)
        for row in self.reload_rows:
            self.model.lp.set_row_upper(row, 1.0)
        self.charges_reloads = True
        if self.reload_rows:
            self.solved_rows = 0
        return bool(self.reload_rows)

    def with_copies_retimed(self, candidate: Candidate) -> Candidate:
        """Return the same placements with better times for the copies."""
        plan, forecast = retime_copies(self.problem.gaps, self.machine, candidate.plan, candidate.forecast, self.until)
        return replace(candidate, plan=plan, forecast=forecast)

    @cached_property
    def reads_offloaded_state(self) -> bool:
        """Return True if ops before the update read state that may be offloaded."""
        return any(state.uses and not state.is_gradient for state in self.problem.states)

    @property
    def ends_early(self) -> bool:
        """Return True if the search for a plan is left to those of `state_search`."""
        return self.reads_offloaded_state and len(self.model.lp.costs) > SMALL and not self.incumbent.is_fair()

    def _simulate(self, solutions: list[Solution], threshold: float, repairs: bool, last: bool) -> bool:
        """Simulate solutions and repair them; return True if the program has changed and is to be solved again."""
        candidates = self._candidates(solutions)
        first = candidates[0]
        retimed = first if self.problem.states else self.with_copies_retimed(first)
        self.incumbent.take(retimed)
        has_charged = self.charges_reloads or (threshold == INFINITY and self.ends_early)
        if not has_charged and self._waits(first, solutions[0]) and self.charge_reloads():
            return True
        if self.incumbent.is_near() or first.peak <= self.machine.budget or not repairs:
            return False
        return time.monotonic() < self.until and not self._repair(candidates, retimed, last)

    def _candidates(self, solutions: list[Solution]) -> list[Candidate]:
        """Return the plans of the solutions that may be better than the best plan."""
        candidates: list[Candidate] = []
        for solution in solutions:
            if candidates and time.monotonic() >= self.until:
                break
            best = self.incumbent.rounded
            if not candidates or best is None or self.step_us + solution.us < best.forecast.us:
                candidates.append(candidate := self._candidate(solution))
                if self.incumbent.take(candidate) and self.incumbent.rounded is candidate:
                    # Where copies wait for each other, other solutions of the same objective may be better.
                    is_as_fast = candidate.forecast.us <= self.step_us + solution.us + ABS_GAP * self.step_us
                    self.best_solution = solution if is_as_fast else None
        return candidates

    def _candidate(self, solution: Solution) -> Candidate:
        """Return the plan of a solution.

        Offloaded state stays on the device between uses that follow faster than a reload takes, or only where there is
        room: both are simulated.
        """
        chosen, inputs = placements(self.model, solution), self.problem.gaps.streamable.inputs
        if not self.problem.states:
            return make_candidate(self.problem.gaps, self.machine, chosen)
        streamed = {storage: Placement.STREAM if storage in inputs else each for storage, each in chosen.items()}
        candidates: list[Candidate] = []
        for each in (chosen, streamed) if streamed != chosen else (chosen,):
            if not candidates or time.monotonic() < self.until:
                candidates.append(self.with_copies_retimed(make_candidate(self.problem.gaps, self.machine, each)))
        return min(candidates, key=lambda each: (max(0, each.peak - self.machine.budget), each.forecast.us))

    def _repair(self, candidates: list[Candidate], retimed: Candidate, last: bool) -> bool:
        """Repair plans with the greedy pass, and add rows where the first is over the budget.

        Returns True if the best plan is near its bound then, or if there are no rows to add.
        """
        most = 1 + self.repair.ops // max(1, self.problem.size)
        if self.repair.only_last:
            most = int(last and self.incumbent.rounded is None)
        for each in candidates[:most]:
            lower = greedy_from(self.problem.gaps, self.machine, each, self.until, self.repair.simulated)
            if not self.incumbent.take(lower):
                self.incumbent.take(self.with_copies_retimed(lower))
        # Other times for its copies may make it fit, and cost too much.
        worst = (retimed if retimed.peak > self.machine.budget else candidates[0]).forecast
        over = _positions_over_budget(self.problem, worst, self.machine.budget)
        new = [position for position in over if position not in self.model.memory.positions]
        for position in spread_out(new, POSITIONS):
            self.model.add_rows(position)
        return self.incumbent.is_near() or not new

    def _waits(self, candidate: Candidate, solution: Solution) -> bool:
        """Return True if a plan that fits takes far longer than its solution says."""
        fits = candidate.peak <= self.machine.budget
        return fits and candidate.forecast.us > (1 + FAIR_GAP) * (self.step_us + solution.us)

    def _limits(self, threshold: float, last: bool) -> SearchLimits | None:
        """Return the limits of a search.  If a wider one follows, it ends once no near plan is left."""
        incumbent = self.incumbent
        left = self.work.left(self.model.lp.search_work, incumbent.gain_us)
        left = min(left, self.work.narrow if self.ends_early else INFINITY)
        if left <= 0:
            return None
        target = incumbent.bound_us + AIM * (incumbent.near_us - incumbent.bound_us)
        abs_gap = ABS_GAP * self.step_us if len(self.model.lp.costs) > SMALL else 0.0
        if threshold == INFINITY:
            enough_bound = incumbent.enough_bound_us if abs_gap else INFINITY
            return SearchLimits(target, enough_bound, AIM * GAP / ABS_GAP * abs_gap, left)
        if last:
            return SearchLimits(target, INFINITY, abs_gap, left)
        return SearchLimits(target, incumbent.near_us, abs_gap, min(left, self.work.narrow))

    def _update_relaxed(self) -> bool:
        """Solve the relaxed program with rows added since; return True if it has a solution."""
        if self.solved_rows != self.model.lp.row_count:
            solution = self.model.lp.solve(max(0.0, self.work.relax - self.model.lp.relax_work))
            if solution is None:
                return False
            self.relaxed, self.solved_rows = solution, self.model.lp.row_count
            self._prove(solution.us, BoundProof.of(self.model.rows.added, solution.duals))
        return True

    def _prove(self, us: float, proof: BoundProof | None = None) -> None:
        if not (self.reload_rows and self.charges_reloads):
            self.incumbent.prove(us, proof)

    def _drop_reload_rows(self) -> None:
        """Let recomputations reload state for nothing again, unless the search is for a plan alone."""
        if self.repair.only_last or not (self.reload_rows and self.charges_reloads):
            return
        for row in self.reload_rows:
            self.model.lp.set_row_upper(row, INFINITY)
        self.solved_rows = 0  # the relaxed solution may be another without them
        self.charges_reloads = False


def _positions_over_budget(problem: PlanProblem, forecast: Forecast, budget: int) -> list[int]:
    """Return the captured positions at which a simulated step is over the budget, the fullest first.

    An op that is not in the captured trace counts for the position behind it.
    """
    positions, worst = problem.gaps.trace.index, dict[int, int]()
    position = problem.size - 1
    for index in reversed(range(len(forecast.trace.ops))):
        position = positions.get(forecast.trace.ops[index].name, position)
        nbytes = int(forecast.total[index])
        if nbytes > max(budget, worst.get(position, 0)):
            worst[position] = nbytes
    return sorted(worst, key=lambda position: -worst[position])


class Incumbent:
    """The best plan that fits the budget, and two bounds on the time that plans add.

    Attributes:
        rounded: the best plan that came from a solution of the linear program.
        polished: plans of local search.
        bound_us: at most what a plan adds that recomputes and reloads each value at most once.
        any_us: at most what any plan adds.
        proofs: dual values that prove them, or as much of them as a linear program does.
    """

    def __init__(self, problem: PlanProblem, tie_us: float) -> None:
        self.problem = problem
        self.step_us = problem.captured.us
        self.tie_us = tie_us
        self.rounded: Candidate | None = None
        self.polished: list[Candidate] = []
        self.bound_us = self.any_us = 0.0
        self.proofs = BoundProofs()
        self._proven_us = 0.0  # by `proofs.once`
        self._results: dict[Candidate, PlanResult] = {}

    @property
    def best(self) -> Candidate | None:
        """The fastest plan.  Less is proven of plans that recompute twice: such a plan has to be faster by that."""
        candidates = [*([self.rounded] if self.rounded else []), *self.polished]
        loss_us = {True: 0.0, False: GAP * self.step_us}
        return min(candidates, key=lambda each: each.forecast.us + loss_us[self._result(each).is_single], default=None)

    def take(self, candidate: Candidate) -> bool:
        """Return True if a plan fits the budget; keep it if it is the fastest so far."""
        if candidate.peak > self.problem.machine.budget:
            return False
        if self.rounded is None or candidate.forecast.us < self.rounded.forecast.us:
            self.rounded = candidate
        return True

    def prove(self, us: float, proof: BoundProof | None = None) -> None:
        """Raise the bound to an objective of the linear program, with the dual values that prove it, if any do."""
        if proof is not None and us - self.tie_us > self._proven_us:
            self.proofs, self._proven_us = replace(self.proofs, once=proof), us - self.tie_us
        self.bound_us = max(self.bound_us, us - self.tie_us)

    def is_near(self) -> bool:
        """Return True if the best plan is near its bound."""
        if self.best is None:
            return False
        least_us = self._least_us(self.best)
        return self.best.forecast.us - least_us <= max(GAP * least_us, NEGLIGIBLE_US)

    def is_fair(self) -> bool:
        """Return True if the best plan is not far from what is proven."""
        best = self.best
        return best is not None and best.forecast.us <= (1 + FAIR_GAP) * (self.step_us + self.bound_us)

    @property
    def gain_us(self) -> float:
        """The most that another plan may be faster than the best one."""
        return INFINITY if self.best is None else max(NEGLIGIBLE_US, self.best.forecast.us - self._least_us(self.best))

    @property
    def near_us(self) -> float:
        """The time that a plan may add to be near its bound."""
        return self.bound_us + max(GAP * (self.step_us + self.bound_us), NEGLIGIBLE_US)

    @property
    def enough_bound_us(self) -> float:
        """The objective that, once proven, makes the best plan near its bound."""
        best = self.best
        if best is None:
            return INFINITY
        return min(best.forecast.us / (1 + GAP), best.forecast.us - NEGLIGIBLE_US) - self.step_us + self.tie_us

    def _least_us(self, candidate: Candidate) -> float:
        return self._result(candidate).lower_bound

    def _result(self, candidate: Candidate) -> PlanResult:
        result = self._results.get(candidate)
        if result is None or (result.bound_us, result.any_us) != (self.bound_us, self.any_us):
            captured = self.problem.captured
            result = PlanResult(candidate.plan, captured, candidate.forecast, self.bound_us, self.any_us)
            self._results[candidate] = result
        return result
