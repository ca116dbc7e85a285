"""The best plan of a search so far, and what is proven of all plans.

a solution, rounded and simulated: 12.83 %, fits; proven: 12.39 %   ->   is_near(), and the search ends
"""

from __future__ import annotations

from dataclasses import replace

from ..lp.linear_program import INFINITY
from ..lp.problem import PlanProblem
from ..schedule.candidate import Candidate
from ..simulate.bound_proof import BoundProof, BoundProofs
from ..simulate.plan_result import PlanResult

GAP = 0.005  # of the step: a gap at which the search ends
FAIR_GAP = 0.02  # of the step: a gap above which a plan is also sought from the one without offload
NEGLIGIBLE_US = 20.0  # microseconds of a step that no search is worth


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
