"""A module's call -> the step that will run it: capture, price, plan, rewrite, assemble."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from passes import BudgetError, Machine, Trace

from ..errors import CaptureError
from ..options.compile_options import CompileOptions
from ..runtime.step import Step
from ..system.disturbance import note_disturbed
from ..system.pass_log import note_plan
from ..system.planning_process import planning
from ..tensors.loss_outputs import OutputSelector
from .assembly import Assembly
from .attempts import Attempts, GraphPlanner, Planned, PricedAttempts, PricedStep, Refused
from .known_captures import EarlierCapture
from .optimizers import optimizer_state
from .pricing import Pricing
from .progress import Progress
from .replan import Replanner
from .scalar_outputs import OtherOutputsDropped
from .step_graph import Call, CallCapture, StepGraph
from .target import ModuleTarget, Target, owned_nbytes

LOG = logging.getLogger(__name__)


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

    @property
    def keeps_captures(self) -> bool:
        """Return True if captured graphs are neither changed nor recorded afterwards."""
        return self.state.keeps_captures and self.target.recorder is None

    def refuse_optimizer(self) -> None:
        """
        Raises:
            UpdateError: no step with this optimizer can be planned.
        """
        # Without a tier it is not the optimizer that keeps its states on the device.
        budget = math.inf if not self.target.tiers else self.target.budget
        self.state.refuse(owned_nbytes(self.module), budget)

    def price(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: OutputSelector, for_any_budget: bool = False
    ) -> PricedStep:
        """Return the priced trace of a call's step, and the machine that it is planned for; as in `priced`."""
        with Progress() as progress:
            return next(self.priced(args, kwargs, outputs, progress, for_any_budget)(self.target.budget))

    def priced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: OutputSelector, progress: Progress,
        for_any_budget: bool = False,
    ) -> PricedAttempts:  # fmt: skip
        """Return the attempts at a plan of a call for any budget.

        Args:
            for_any_budget: True to measure what only a plan needs although the step fits the budget.

        They raise:
            CaptureError: the module can't be captured.
            FusedError: updates run in backward, and the loss is not part of the step.
        """
        call = Call(self.module, args, kwargs, outputs, opaque=self.options.opaque)

        def price(graph: StepGraph) -> tuple[Trace, Machine]:
            graph = replace(graph, target=self.target)
            return Pricing(self.module, self.options, self.state, progress, for_any_budget=for_any_budget)(graph)

        attempts = partial(self._attempts, call, progress)
        return PricedAttempts(attempts, price, self.target.device, self.options.slices == "auto")

    def step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: OutputSelector,
        earlier: EarlierCapture | None = None, general: CallCapture | None = None, preferred: Sequence[str] = (),
    ) -> Step:  # fmt: skip
        """Return the step of a call, ready to run.

        Args:
            outputs: selects the outputs that backward starts from.
            earlier: a capture of the same call, whether it adds to gradients or not.
            general: captures the call with floats as inputs or with symbols for lengths, if they can be, or knows its
                capture.
            preferred: submodules that run as they are if they can.

        Raises:
            BudgetError: no plan fits the budget.
            CaptureError: the module can't be captured.
            PlanError: plans were given, and none fits this call.
        """
        call = Call(self.module, args, kwargs, outputs, general, self.options.opaque, preferred)
        with planning(self.target.device), Progress() as progress:
            planned = self._planned(call, progress, earlier)
            gc.collect()  # graphs that no plan fits, and that for all outputs, are cycles, and may hold constants
            if isinstance(planned, Step):
                return planned.without_other_outputs(earlier.all_outputs) if earlier is not None else planned
            step = self._planned(planned.call, progress)
            assert isinstance(step, Step)  # there are no fewer outputs than scalars
            return step.without_other_outputs(planned.needed_nbytes)

    def preferred_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: OutputSelector, preferred: Sequence[str]
    ) -> Step | None:
        """Return a step in which these submodules run as they are; None if there is no plan of one."""
        try:
            return self.step(args, kwargs, outputs, preferred=preferred)
        except (CaptureError, BudgetError) as error:
            LOG.info("%s can't run as they are from now on: %s", ", ".join(preferred), error)
            return None

    def _planned(
        self, call: Call, progress: Progress, earlier: EarlierCapture | None = None
    ) -> Step | OtherOutputsDropped:
        refused: list[Refused] = []
        attempts = self._attempts(call, progress, earlier)
        plan = GraphPlanner(self.module, self.options, self.state, call, progress)
        for attempt in attempts:
            planned = plan(attempt)
            if isinstance(planned, Planned):
                step = self._step(planned)
                return step if call.nearby is None else step.without_replan()
            refused.append(planned)
            attempts.note_refused(planned.smallest, planned.least_in_blocks)
        return min(refused, key=lambda each: each.smallest).refuse(attempts)

    def _attempts(
        self, call: Call, progress: Progress, earlier: EarlierCapture | None = None, budget: int | None = None
    ) -> Attempts:
        """Return the attempts at a plan of a call, for the target's budget or another one."""
        target = partial(self._current_target, budget)
        return Attempts(call, target, self.state, self.options, progress, earlier)

    def _current_target(self, budget: int | None = None) -> Target:
        target = self.targets.current()
        self.state.move_to(target.location)
        return target if budget is None else replace(target, budget=budget)

    def _step(self, planned: Planned) -> Step:
        """Return the step that carries out a plan, with what its later runs need."""
        graph, result = planned.graph, planned.result
        accumulated = planned.accumulated()
        assembled = self.assemble(graph, planned.machine, result, planned.began)
        check = graph.ranks.step_check(result.forecast.trace)
        parts = replace(assembled.parts, rank_check=check, accumulated_plan=accumulated.plan)
        report = replace(assembled.stated(), adding=accumulated.needed)
        report = replace(report, disturbed=note_disturbed(planned.later.pricing.doubts))
        note_plan(lambda: {"model": type(self.module).__name__, **report.summary})
        assemble = partial(self.assemble, replace(graph, later=None))
        replan = Replanner(self.options, assemble, result.captured.trace, assembled.lowering, self.state.update)
        # Ranks measure different times, and would choose different plans.
        later_plans = None if graph.ranks.plan_together else replan
        return Step(parts, report, replan=later_plans, on_measured=self.state.on_measured)
