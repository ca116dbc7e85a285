"""Attempts at a plan of a call -> a plan of one of their graphs, or the reason why there is none.

an attempt that fits           ->   Planned: its graph and its plan, or those of the whole step if that is faster
a budget that no plan keeps    ->   Refused

The attempts at a plan of a call, priced once each, for any budget.

steps(8 << 30)   ->   the step with whole weights, then, as long as the caller asks, in blocks of rows, in smaller ones
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from passes import BudgetError, Machine, PlanResult, Trace
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp.problem import PlanProblem
from passes.slices.whole_step import Search, among, is_faster, needs_none, whole_plan

from ...errors import PlanError
from ...options.compile_options import CompileOptions
from ...system.planning_process import planning
from ..accumulated_step import AccumulatedStep
from ..known_captures import EarlierCapture
from ..later_step import LaterStep
from ..optimizer_state import OptimizerState
from ..pricing import Pricing
from ..progress import Progress
from ..scalar_outputs import OtherOutputsDropped, needed_nbytes, with_scalars_only
from ..search import PlanSearch
from ..step_graph import Call, LayoutsDiffer, StepGraph
from .attempts import Attempt, Attempts, cuts_of
from .refusal import budget_error, refuse_value_run

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
        least_in_blocks: bytes that every plan needs even if weights came in blocks of rows.
        refuse: raises the error, with the weights that stay whole in all attempts, or returns what is planned instead.
    """

    smallest: int
    least_in_blocks: int
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
        captured_s = time.perf_counter() - began
        until = time.monotonic() + self.options.planning_s(captured_s)
        self.progress.bound(until)
        pricing = Pricing(self.module, self.options, self.state, self.progress, until, call.nearby)
        for_scalars = with_scalars_only(call, graph)
        search = PlanSearch(self.options, self.progress, until, is_last=for_scalars is None)
        later = LaterStep(graph, pricing, search)
        if earlier is None or not self.state.keeps_captures:  # otherwise nothing has run
            resident_nbytes = self.state.resident_nbytes()
            refuse_value_run(call, graph, resident_nbytes, partial(_needed_nbytes, pricing, search, later))
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
                raise budget_error(failed, later.needed_nbytes, attempts.whole) from None

            smallest = failed.smallest if isinstance(failed, BudgetError) else 0
            return Refused(smallest, _least_in_blocks(trace, machine, smallest), refuse)
        return Planned(graph, machine, result, later, began)

    def _or_whole(self, attempt: Attempt, sliced: Planned) -> Planned:
        """Return the plan that was found, or that of the whole step if it is faster.

        What is left of the time limit is for both. A user who interrupts a search wants to begin.
        """
        search = sliced.later.search
        if needs_none(sliced.result) or sliced.result.interrupted or time.monotonic() >= search.until:
            return sliced
        try:
            graph = attempt.whole(sliced.machine)
            if graph is None:
                return sliced
            trace, machine = sliced.later.pricing(graph)
            result = whole_plan(sliced.result, trace, machine, replace(search, interruptible=True).plan_below)
        except KeyboardInterrupt:
            LOG.warning("interrupted: the step runs in slices, and may be faster without; interrupt again to stop")
            return sliced
        planned = Planned(graph, machine, result, replace(sliced.later, first=graph), sliced.began)
        return _faster(planned, sliced)


def _least_in_blocks(trace: Trace, machine: Machine, smallest: int) -> int:
    """Return bytes that every plan needs even if weights come in blocks: these spare no more than all state has."""
    program = PlanProblem(ReuseGaps(trace), machine)
    return max(program.least_beside_states, smallest - sum(each.nbytes for each in program.states))


def _needed_nbytes(pricing: Pricing, search: PlanSearch, later: LaterStep, budget: int) -> int:
    """Return a budget of at least so many bytes for which the quick passes find plans of all later calls.

    Ranks that plan together are not asked: some of them may have no error.
    """
    if later.first.ranks.plan_together:
        return budget
    trace, machine = pricing(later.first)
    quick = replace(search, until=time.monotonic(), is_last=False)
    try:
        quick.search(trace, replace(machine, budget=budget))
    except BudgetError as error:
        budget = error.smallest
    return max(budget, later.needed_nbytes())


def _faster(whole: Planned, sliced: Planned) -> Planned:
    if not is_faster(whole.result, sliced.result, whole.machine.budget):
        fits = whole.result.forecast.peak <= whole.machine.budget
        return replace(sliced, result=among(sliced.result, whole.result), other=whole if fits else None)
    LOG.info("whole %s, in slices %s: the step stays whole", whole.result.forecast, sliced.result.forecast)
    return replace(whole, result=among(whole.result, sliced.result), other=sliced)


@dataclass(frozen=True)
class PricedStep:
    """A step to plan.

    Attributes:
        cuts: slices and blocks; steps of the same call with the same ones are the same.
        whole: returns the step without slices, which may have a faster plan; None if there is none.
    """

    trace: Trace
    machine: Machine
    cuts: object = ()
    whole: Callable[[Machine], PricedStep | None] = lambda machine: None

    def beside(self, plan: PlanResult, machine: Machine, search: Search) -> tuple[PricedStep, PlanResult] | None:
        """Return the step without slices, and what is known of it beside a plan of this one; None if that counts."""
        step = None if needs_none(plan) else self.whole(machine)
        if step is None:
            return None
        return step, whole_plan(plan, step.trace, replace(step.machine, budget=machine.budget), search)


class PricedAttempts:
    """The attempts of one call."""

    def __init__(
        self, attempts: Callable[[EarlierCapture | None, int], Attempts],
        price: Callable[[StepGraph], tuple[Trace, Machine]], device: torch.device, by_budget: bool,
    ) -> None:  # fmt: skip
        """Begin.

        Args:
            attempts: makes the attempts for a budget, of an earlier capture.
            by_budget: False if they are the same for every budget.
        """
        self.attempts, self.price, self.device, self.by_budget = attempts, price, device, by_budget
        self.earlier: EarlierCapture | None = None
        self.known: dict[object, PricedStep] = {}  # by what is cut
        self.started: dict[int, tuple[list[PricedStep], Iterator[Attempt]]] = {}

    def __call__(self, budget: int) -> Iterator[PricedStep]:
        """Yield the steps to plan for a budget, in their order.

        Raises:
            CaptureError: the module can't be captured.
            FusedError: updates run in backward, and the loss is not part of the step.
        """
        key = budget if self.by_budget else 0
        if key not in self.started:
            self.started[key] = [], iter(self.attempts(self.earlier, budget))
        found, rest = self.started[key]
        for i in itertools.count():
            if i == len(found) and not self._add_next(found, rest):
                return
            yield found[i]

    def _add_next(self, found: list[PricedStep], rest: Iterator[Attempt]) -> bool:
        with planning(self.device):
            attempt = next(rest, None)
            if attempt is None:
                return False
            self.earlier = self.earlier or EarlierCapture(attempt.graph.captured.unsliced)
            found.append(replace(self._priced(attempt.graph), whole=partial(self._whole, attempt)))
            return True

    def _whole(self, attempt: Attempt, machine: Machine) -> PricedStep | None:
        with planning(self.device):
            graph = attempt.whole(machine)
            return None if graph is None else self._priced(graph)

    def _priced(self, graph: StepGraph) -> PricedStep:
        cuts = cuts_of(graph)
        if cuts not in self.known:
            self.known[cuts] = PricedStep(*self.price(graph), cuts)
        return self.known[cuts]
