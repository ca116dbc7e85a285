"""Plan a step again with the times that its ops took inside the step, if another plan is then faster.

forecast 40 ms with ops timed alone, 55 ms with times of the step; another plan takes 50 ms   ->   that plan
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from passes import BudgetError, Machine, PlanResult, Trace, apply, predict

from ..errors import RecordingError
from ..optim.offloaded_update import OffloadedUpdate
from ..options.compile_options import CompileOptions
from ..profile.step_timer import StepTimes
from ..report.tables import mb
from ..runtime.step import Step
from .assembly import AssembledStep
from .lowering.lowering import NotLowered
from .measured_prices import with_measured_times
from .plan_cache import is_final, remember
from .progress import Progress
from .search import PlanSearch

Search = Callable[[Trace, Machine], PlanResult]

WORTH = 0.02  # of the step's time: the least that a new plan has to save


@dataclass(frozen=True, eq=False)
class Replanner:
    """Plans a step again once its ops were timed inside it.

    Attributes:
        assemble: makes the step of a plan, given the machine, the plan's result, when planning began, and maybe why
            nothing is compiled as one.
        plain: the trace that the first plan was made for.
        lowering: the compiled segments of the step that was timed.
        update: its copies run beside the step's.
    """

    options: CompileOptions
    assemble: Callable[..., AssembledStep]
    plain: Trace
    lowering: NotLowered
    update: OffloadedUpdate

    def __call__(self, step: Step, times: StepTimes | None) -> Step:
        """Return a step with a better plan, or the same step; without times, the same plan with regions in segments.

        A replaced step's tier is not closed here: it closes itself when its last run ends.
        """
        began = time.perf_counter()
        choice, machine = step.report.choice, step.report.machine
        if times is None:
            split = f"measured {mb((step.report.measured or 0) - step.report.peak)} over the forecast"
            return self._replaced(step, self.assemble(machine, choice, began, split))
        times = self.lowering.split_times(times)
        trace, measured = with_measured_times(choice, machine, times.beside(self.update.copies))
        step.note_repriced(predict(apply(trace, choice.plan), measured).us)
        key = self.plain, machine, self.options.search_key
        is_kept = step.history.is_untouched and is_final(*key)
        if not choice.plan or self.options.plans or is_kept:
            return step
        with Progress() as progress:
            search = PlanSearch(self.options, progress, time.monotonic() + self.options.planning_s())
            better = replanned(choice, trace, measured, search.search)
        remember(*key, better or choice, final=True)
        if better is None:
            return step
        try:
            assembled = self.assemble(measured, better, began)
        except RecordingError:
            return step
        return self._replaced(step, assembled)

    def _replaced(self, step: Step, assembled: AssembledStep) -> Step:
        return step.replaced_by(assembled.parts, assembled.report, replace(self, lowering=assembled.lowering))


def replanned(choice: PlanResult, trace: Trace, machine: Machine, search: Search) -> PlanResult | None:
    """Return a plan of `search` that is faster by `WORTH`; None if there is none.

    `trace` and `machine` have the prices measured inside the step, and forecast both plans.
    """
    enough = (1 - WORTH) * predict(apply(trace, choice.plan), machine).us
    if predict(trace, machine).us >= enough:  # no plan is faster than the step without one
        return None
    try:
        better = search(trace, machine)
    except BudgetError:  # with other prices the search takes another way, which may end without a plan
        return None
    return better if predict(better.forecast.trace, machine).us < enough else None
