"""The plan of a priced step: a saved one, one found before, or one that is searched for.

options.plans        ->   the saved plan that fits this call
an earlier search    ->   the plan that is in the cache
otherwise            ->   passes in order, until `until`
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import passes
from passes import Machine, Plan, PlanResult, Trace, make_plan
from passes.concurrent_forwards import plan_forwards
from passes.explain import least_nbytes

from ..options.compile_options import CompileOptions
from ..report.reuse_plan import reuse_plan
from ..runtime.released_outputs import search_with_released
from .accumulated_step import or_known
from .plan_cache import find_plan
from .progress import Progress

LOG = logging.getLogger(__name__)
FITTING_S = 120.0  # of search beyond the default limit, while no plan fits


@dataclass(frozen=True)
class PlanSearch:
    """Finds plans for one call.

    Attributes:
        until: when planning has to end, in seconds of `time.monotonic`.
        known: a plan to fall back on.
        is_last: False if the call is planned in another way where nothing fits.
    """

    options: CompileOptions
    progress: Progress
    until: float
    known: Plan | None = None
    is_last: bool = True

    def __call__(self, trace: Trace, machine: Machine) -> PlanResult:
        """Return a plan within the budget.

        No cached plan knows what other open forwards hold, so those are always searched for.

        Raises:
            BudgetError: no plan was found.
            PlanError: plans were given, and none fits this call.
        """
        if self.options.plans:
            return reuse_plan(self.options.plans, trace, machine)
        return or_known(self._cached if self.options.forwards == 1 else self.search, self.known)(trace, machine)

    def _cached(self, trace: Trace, machine: Machine) -> PlanResult:
        return find_plan(trace, machine, self.options.search_key, self.search)

    def search(self, trace: Trace, machine: Machine) -> PlanResult:
        """Return a new plan."""
        self.progress.phase("planning, passes tried", len(passes.PASSES))
        if self.options.forwards > 1:  # while one of them runs, the caller holds the outputs of the others
            return plan_forwards(trace, machine, self.options.forwards, self._run_passes)
        if not self.is_last:
            return self._run_passes(trace, machine)
        return search_with_released(self._run_passes, trace, machine)

    def _run_passes(self, trace: Trace, machine: Machine) -> PlanResult:
        """Return the plan of the passes; only a limit that was given leaves a budget without one for want of time."""
        try:
            return make_plan(trace, machine, log=self.progress.done, seconds=self._left(self.until))
        except passes.BudgetError as error:
            late = self.until + FITTING_S
            is_bounded = self.options.time_limit is not None or time.monotonic() >= late
            if is_bounded or not (error.timed_out and self.is_last):
                raise
            if least_nbytes(trace, machine) > machine.budget:
                raise  # it is proven that none fits
            LOG.info("no plan fits so far: it is searched for up to %.0f s more; time_limit= bounds it", FITTING_S)
            return make_plan(trace, machine, log=self.progress.done, seconds=self._left(late))

    def _left(self, until: float) -> float:
        return max(0.0, until - time.monotonic())
