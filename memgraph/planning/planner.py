"""A module's call -> the step that will run it: capture, price, plan, rewrite, assemble."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from passes import BudgetError, Machine, PlanResult, Trace

from ..capture.floats.float_capture import FloatCapture
from ..capture.sizes.size_capture import SizeCapture
from ..errors import PlanError
from ..graph.provenance import counting_nodes
from ..guards.signature import parameters_with_grad_hooks
from ..options.compile_options import CompileOptions
from ..profile.page_faults import page_faults_us
from ..runtime.step import Step
from ..system.device import releasing_cached
from ..system.garbage import collecting_new_objects
from ..system.graph_sources import forgotten_sources
from ..system.locks import PLANNING_LOCK
from ..tensors.loss_outputs import OutputSelector
from .accumulated_step import AccumulatedStep, plan_accumulated, warn_accumulation
from .assembly import Assembly
from .budget_error import budget_error, has_time_left, refuse_value_run
from .capture_cache import EarlierCapture, KnownLength
from .follower_cache import find_follower
from .optimizers import optimizer_state
from .pricing import Pricing
from .progress import Progress
from .replan import Replanner
from .scalar_outputs import OtherOutputsDropped, needed_nbytes, with_scalars_only
from .search import PlanSearch
from .step_graph import Call, StepGraph, capture_step
from .target import ModuleTarget, Target, owned_nbytes


class Planner:
    """Plans the steps of one module."""

    def __init__(self, module: nn.Module, options: CompileOptions) -> None:
        self.module, self.options = module, options
        self.targets = ModuleTarget(module, options)
        self.state = optimizer_state(module, options, self.target.device)
        self.state.move_to(self.target.location)
        self.assemble = Assembly(module, options, self.state)

    @property
    def target(self) -> Target:
        """Where the module was when it was last planned for."""
        return self.targets.latest

    def refuse_optimizer(self) -> None:
        """
        Raises:
            UpdateError: no step with this optimizer can be planned.
        """
        # Without a tier it is not the optimizer that keeps its states on the device.
        budget = math.inf if self.target.tier is None else self.target.budget
        self.state.refuse(owned_nbytes(self.module), budget)

    def price(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: OutputSelector) -> tuple[Trace, Machine]:
        """Return the priced trace of a call's step, and the machine that it is planned for.

        Raises:
            CaptureError: the module can't be captured.
            FusedError: updates run in backward, and the loss is not part of the step.
        """
        with PLANNING_LOCK, Progress() as progress:
            graph = self._capture(Call(self.module, args, kwargs, outputs, opaque=self.options.opaque), progress)
            return Pricing(self.module, self.options, self.state, progress)(graph)

    @property
    def keeps_captures(self) -> bool:
        """Return True if captured graphs are neither changed nor recorded afterwards."""
        return self.state.keeps_captures and self.target.recorder is None

    def step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: OutputSelector,
        earlier: EarlierCapture | None = None, general: FloatCapture | SizeCapture | KnownLength | None = None,
    ) -> Step:  # fmt: skip
        """Return the step of a call, ready to run.

        Args:
            outputs: selects the outputs that backward starts from.
            earlier: a capture of the same call, whether it adds to gradients or not.
            general: captures the call with floats as inputs or with symbols for lengths, if they can be, or knows its
                capture.

        Raises:
            BudgetError: no plan fits the budget.
            CaptureError: the module can't be captured.
            PlanError: plans were given, and none fits this call.
        """
        call = Call(self.module, args, kwargs, outputs, general, self.options.opaque)
        with (
            PLANNING_LOCK,
            forgotten_sources(),
            collecting_new_objects(),
            releasing_cached(self.target.device),
            Progress() as progress,
        ):
            planned = self._planned(call, progress, earlier)
            if isinstance(planned, Step):
                return planned
            gc.collect()  # the graph for all outputs is part of cycles, and may hold constants
            step = self._planned(planned.call, progress)
            assert isinstance(step, Step)  # there are no fewer outputs than scalars
            return step.without_other_outputs(planned.needed_nbytes)

    def _planned(
        self, call: Call, progress: Progress, earlier: EarlierCapture | None = None
    ) -> Step | OtherOutputsDropped:
        began = time.perf_counter()
        graph = self._capture(call, progress, earlier)
        refuse_value_run(call, graph.captured.value_run_nbytes, graph.target.budget)
        captured_s = time.perf_counter() - began
        until = time.monotonic() + self.options.planning_s(captured_s)
        progress.bound(until)
        nearby = call.general.nearby if isinstance(call.general, KnownLength) else None
        pricing = Pricing(self.module, self.options, self.state, progress, until, nearby)
        for_scalars = with_scalars_only(call, graph.captured)
        search = PlanSearch(self.options, progress, until, is_last=for_scalars is None)
        trace, machine = pricing(graph)
        try:
            known = earlier.accumulated_plan if earlier is not None else None
            result = graph.ranks.choose(trace, machine, replace(search, known=known))
        except (BudgetError, PlanError) as error:
            if for_scalars is not None:
                return OtherOutputsDropped(for_scalars, needed_nbytes(error, trace, machine))
            if isinstance(error, PlanError):
                raise
            suggest = self.state.fused_update is None and has_time_left(graph, captured_s, until)
            needed = partial(_accumulated_nbytes, graph, pricing, search)
            raise budget_error(error, call, graph, needed, suggest) from None
        accumulated = self._accumulated(graph, pricing, search, result, machine)
        step = self._step(graph, machine, result, accumulated, began)
        return step if nearby is None else step.without_replan()

    def _capture(self, call: Call, progress: Progress, earlier: EarlierCapture | None = None) -> StepGraph:
        progress.phase("capturing forward and backward, ops traced")
        reused = earlier.captured if earlier is not None and self.state.keeps_captures else None
        with counting_nodes(progress.done):
            return capture_step(call, self._current_target, self.state, self.options, reused)

    def _current_target(self) -> Target:
        target = self.targets.current()
        self.state.move_to(target.location)
        return target

    def _accumulated(
        self, graph: StepGraph, pricing: Pricing, search: PlanSearch, result: PlanResult, machine: Machine
    ) -> AccumulatedStep:
        """Return what the same call needs when it adds to gradients; warn if that is more than the budget."""
        later, alone = graph.later, self.options.forwards == 1
        if later is None or self.options.plans:
            return AccumulatedStep()

        def plan() -> AccumulatedStep:
            trace, machine = pricing(later)
            tries = ((), result.plan) if alone else ()
            until = math.inf if graph.ranks.plan_together else search.until  # ranks end at different times
            return plan_accumulated(trace, machine, tries, partial(graph.ranks.choose, search=search), until)

        if alone and not graph.ranks.plan_together:
            hooked = tuple(sorted(parameters_with_grad_hooks(self.module)))
            options = "adds to gradients", self.options.search_key, hooked
            step = result.captured.trace, machine, options
            accumulated = find_follower(*step, plan)
        else:
            accumulated = plan()
        warn_accumulation(accumulated, machine.budget)
        return accumulated if alone else replace(accumulated, plan=None)  # several forwards leave less for each

    def _step(
        self, graph: StepGraph, machine: Machine, result: PlanResult, accumulated: AccumulatedStep, began: float
    ) -> Step:
        """Return the step that carries out a plan, with what its later runs need."""
        assembled = self.assemble(graph, machine, result, began)
        check = graph.ranks.step_check(result.forecast.trace)
        parts = replace(assembled.parts, rank_check=check, accumulated_plan=accumulated.plan)
        stated = assembled.lowering.restated(result, machine)
        pages_us = page_faults_us(stated.forecast, machine)
        report = replace(assembled.report, choice=stated, adding=accumulated.needed, pages_us=pages_us)
        assemble = partial(self.assemble, replace(graph, later=None))
        replan = Replanner(self.options, assemble, result.captured.trace, assembled.lowering, self.state.update)
        # Ranks measure different times, and would choose different plans.
        later_plans = None if graph.ranks.plan_together else replan
        return Step(parts, report, replan=later_plans, on_measured=self.state.on_measured)


def _accumulated_nbytes(graph: StepGraph, pricing: Pricing, search: PlanSearch) -> int:
    """Return the least bytes with a plan for the same call when it adds to gradients; 0 if it never does."""
    if graph.later is None:
        return 0
    try:
        return graph.ranks.choose(*pricing(graph.later), search).forecast.peak
    except BudgetError as error:
        return error.smallest
