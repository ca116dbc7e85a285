"""The plan of a priced step: a saved one, one found before, or one that is searched for.

options.plans        ->   the saved plan that fits this call
an earlier search    ->   the plan that is in the cache
otherwise            ->   passes in order, until `until`
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import passes
from passes import Machine, Plan, PlanResult, Trace, make_plan
from passes.concurrent_forwards import plan_forwards
from passes.pipeline import BESIDE
from passes.simulate.plan_result import try_plan

from ..options.compile_options import CompileOptions
from ..report.reuse_plan import reuse_plan
from ..runtime.released_outputs import most_released
from ..system.pass_log import PassLog
from .plan_cache import cached_plan, remember
from .progress import Progress

LOG = logging.getLogger(__name__)
INTERRUPTED = (
    "interrupted: the search ends with the best plan so far, which adds %s to the step, %s above what is proven; "
    "interrupt again to stop"
)
FITTING_S = 120.0  # of search beyond the default limit, while no plan fits


@dataclass(frozen=True)
class PlanSearch:
    """Finds plans for one call.

    Attributes:
        until: when planning has to end, in seconds of `time.monotonic`.
        known: a plan to fall back on: the caller was told that the step fits.
        is_last: False if the call is planned in another way where nothing fits.
        interruptible: True if an interrupt of the user ends the search, once a plan fits.
        below: microseconds of the step; only plans that take less are of use, and their search is short.
    """

    options: CompileOptions
    progress: Progress
    until: float
    known: Plan | None = None
    is_last: bool = True
    interruptible: bool = False
    below: float = math.inf

    def __call__(self, trace: Trace, machine: Machine) -> PlanResult:
        """Return a plan within the budget.

        No cached plan knows what other open forwards hold, so those are always searched for.

        Raises:
            BudgetError: no plan was found.
            PlanError: plans were given, and none fits this call.
        """
        if self.options.plans:
            return reuse_plan(self.options.plans, trace, machine)
        try:
            return self._cached_or_new(trace, machine)
        except passes.BudgetError:
            known = None if self.known is None else try_plan(self.known, trace, machine)
            if known is None or known.forecast.peak > machine.budget:
                raise
            return known

    def plan_below(self, trace: Trace, machine: Machine, us: float) -> PlanResult:
        """Return a plan of a step that takes less than `us`; what is proven, maybe over the budget, if there is none.

        Its plan is cached for other searches like it alone, as a search without a limit may find a better one.
        """
        known = cached_plan(trace, machine, self.options.search_key)
        return known or replace(self, below=us)._cached_or_new(trace, machine, "below")

    def _cached_or_new(self, trace: Trace, machine: Machine, *kind: str) -> PlanResult:
        if self.options.forwards > 1:
            return self.search(trace, machine)
        step = trace, machine, (*self.options.search_key, *kind)
        result = cached_plan(*step) or self.search(trace, machine)
        if not result.interrupted and result.forecast.peak <= machine.budget:
            remember(*step, result)
        return result

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
            return self._made(trace, machine, self.until)
        except passes.BudgetError as error:
            late = self.until + FITTING_S
            is_bounded = self.options.time_limit is not None or time.monotonic() >= late
            if is_bounded or not (error.timed_out and self.is_last):
                raise
            LOG.info("no plan fits so far: it is searched for up to %.0f s more; time_limit= bounds it", FITTING_S)
            return self._made(trace, machine, late)

    def _made(self, trace: Trace, machine: Machine, until: float) -> PlanResult:
        log, seconds = PassLog(partial(self.progress.tried, budget=machine.budget)), max(0.0, until - time.monotonic())
        ends = self.interruptible and self.options.forwards == 1  # several forwards are searched for several times
        run = make_plan if self.below == math.inf else partial(make_plan, passes=BESIDE, below=self.below)
        result = run(trace, machine, log=log, seconds=seconds, interruptible=ends)
        if result.interrupted:
            LOG.warning(INTERRUPTED, f"{result.overhead:+.1%}", f"{result.gap:.1%}")
        return result


def search_with_released(search: Callable[[Trace, Machine], PlanResult], trace: Trace, machine: Machine) -> PlanResult:
    """Return the plan that `search` finds for a step, or else for the step of a caller that frees its outputs.

    Raises:
        passes.BudgetError: it finds none for either.
    """
    try:
        return search(trace, machine)
    except passes.BudgetError as error:
        freeing = most_released(trace)
        if freeing == trace:
            raise
        try:
            return search(freeing, machine)
        except passes.BudgetError as other:
            if other.smallest < error.smallest:
                error.released = other.smallest
            raise error from None
