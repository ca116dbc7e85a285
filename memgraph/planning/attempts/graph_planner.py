"""Attempts at a plan of a call -> a plan of one of their graphs, or the reason why there is none.

an attempt that fits           ->   Planned: its graph and its plan, or those of the whole step if that is faster
a budget that no plan keeps    ->   Refused
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from passes import BudgetError, Machine, PlanResult, make_plan
from passes.simulate.plan_result import LeastTimes
from passes.slices.whole_step import among, is_faster, may_gain, whole_plan

from ...errors import PlanError
from ...options.compile_options import CompileOptions
from ..accumulated_step import AccumulatedStep
from ..later_step import LaterStep
from ..optimizer_state import OptimizerState
from ..pricing import Pricing, op_profiler
from ..progress import Progress
from ..scalar_outputs import OtherOutputsDropped, needed_nbytes, with_scalars_only
from ..search import PlanSearch
from ..step_graph import Call, LayoutsDiffer, StepGraph
from .attempts import Attempt, Attempts
from .refusal import budget_error, has_time_left, refuse_value_run

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """A graph with a plan that fits.

    Attributes:
        later: the step of the same call once gradients exist.
        began: when its capture began, in seconds of `time.perf_counter`.
        other: the graph of the same call with other slices or none, whose plan fits as well.
    """

    graph: StepGraph
    machine: Machine
    result: PlanResult
    later: LaterStep
    began: float
    other: Planned | None = None

    def accumulated(self) -> AccumulatedStep:
        """Return the same step once gradients exist; it is then planned in both ways again."""
        return self.later.accumulated(self.result, self.machine, self._other_accumulated)

    def _other_accumulated(self) -> AccumulatedStep | None:
        other = self.other
        return None if other is None else other.later.unwarned(other.result, other.machine)


@dataclass(frozen=True)
class Refused:
    """A step that no plan fits.

    Attributes:
        smallest: the fewest bytes for which a plan was found.
        refuse: raises the error, with the weights that stay whole in all attempts, or returns what is planned instead.
    """

    smallest: int
    refuse: Callable[[Attempts], OtherOutputsDropped]


@dataclass(frozen=True, eq=False)
class GraphPlanner:
    """Plans the graphs of one call."""

    module: nn.Module
    options: CompileOptions
    state: OptimizerState
    call: Call
    progress: Progress

    def __call__(self, attempt: Attempt) -> Planned | Refused:
        """Return the fastest plan of an attempt, with slices or without."""
        try:
            found = self._planned(attempt, attempt.graph)
        except LayoutsDiffer:
            found = self._planned(attempt, attempt.graph.with_numbers())
        return found if isinstance(found, Refused) else self._or_whole(attempt, found)

    def _planned(self, attempt: Attempt, graph: StepGraph) -> Planned | Refused:
        call, began, earlier = self.call, attempt.began, attempt.earlier
        refuse_value_run(call, graph)
        captured_s = time.perf_counter() - began
        until = time.monotonic() + self.options.planning_s(captured_s)
        self.progress.bound(until)
        pricing = Pricing(self.module, self.options, self.state, self.progress, until, call.nearby)
        for_scalars = with_scalars_only(call, graph)
        search = PlanSearch(self.options, self.progress, until, is_last=for_scalars is None)
        later = LaterStep(graph, pricing, search)
        trace, machine = pricing(graph)
        try:
            known = earlier.accumulated_plan if earlier is not None else None
            interruptible = not graph.ranks.plan_together  # the others would wait
            result = graph.ranks.choose(trace, machine, replace(search, known=known, interruptible=interruptible))
        except (BudgetError, PlanError) as error:
            # The name ends with the clause; the traceback has the caller's frames, with all that they will hold.
            failed = error.with_traceback(None)

            def refuse(attempts: Attempts) -> OtherOutputsDropped:
                if for_scalars is not None:
                    return OtherOutputsDropped(for_scalars, needed_nbytes(failed, trace, machine))
                if isinstance(failed, PlanError):
                    raise failed
                suggest = self.state.fused_update is None and has_time_left(graph, captured_s, until)
                raise budget_error(failed, call, graph, later.needed_nbytes, suggest, attempts.whole) from None

            smallest = failed.smallest if isinstance(failed, BudgetError) else 0
            return Refused(smallest, refuse)
        return Planned(graph, machine, result, later, began)

    def _or_whole(self, attempt: Attempt, sliced: Planned) -> Planned:
        """Return the plan that was found, or that of the whole step if it is faster.

        What is left of the time limit is for both. A user who interrupts a search wants to begin.
        """
        if sliced.result.interrupted or time.monotonic() >= sliced.later.search.until:
            return sliced
        try:
            whole = attempt.whole(sliced.machine)
            return sliced if whole is None else self._faster(sliced, whole)
        except BudgetError:  # at prices of more runs, an op may take more workspace
            return sliced
        except KeyboardInterrupt:
            LOG.warning("interrupted: the step runs in slices, and may be faster without; interrupt again to stop")
            return sliced

    def _faster(self, sliced: Planned, graph: StepGraph) -> Planned:
        """Return the faster plan, of the step in slices or of the whole.

        Ops of a step that fits are timed by a single run. All are timed well only if the whole may gain by that.
        """
        result, machine = sliced.result, sliced.machine
        is_rough = result.captured.peak <= machine.budget
        whole_us = result.captured.us + self._more_us(sliced, graph, not is_rough)
        if not may_gain(result, whole_us, is_rough):
            return replace(sliced, result=replace(result, others=LeastTimes(whole_us, whole_us)))
        pricing = sliced.later.pricing
        if is_rough:
            trace, machine = replace(pricing, for_any_budget=True)(sliced.graph)
            sliced = replace(sliced, result=make_plan(trace, machine, ()), machine=machine)
        trace, machine = pricing(graph)
        search = replace(sliced.later.search, interruptible=True)
        result = whole_plan(sliced.result, trace, machine, search.plan_below)
        return _chosen(Planned(graph, machine, result, replace(sliced.later, first=graph), sliced.began), sliced)

    def _more_us(self, sliced: Planned, graph: StepGraph, times: bool) -> float:
        """Return how much longer the ops of a graph take, without a plan, than those of the one in slices."""
        until, target = sliced.later.search.until, graph.target
        profiler = op_profiler(graph.inputs, self.module, target, until, times, self.progress)
        with profiler.together(graph.priced):
            whole = graph.summarize(profiler)
        names = {node.name for node in sliced.graph.graph.nodes}
        parts = (op.us for op in sliced.result.captured.trace.ops if op.name in names)
        return sum(op.us for op in whole.ops) - sum(parts)


def _chosen(whole: Planned, sliced: Planned) -> Planned:
    if not is_faster(whole.result, sliced.result, whole.machine.budget):
        fits = whole.result.forecast.peak <= whole.machine.budget
        return replace(sliced, result=among(sliced.result, whole.result), other=whole if fits else None)
    LOG.info("whole %s, in slices %s: the step stays whole", whole.result.forecast, sliced.result.forecast)
    return replace(whole, result=among(whole.result, sliced.result), other=sliced)
