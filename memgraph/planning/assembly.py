"""A plan -> the parts of the step that carries it out.

plan   ->   rewritten graph   ->   compiled segments   ->   two halves, slots in the tier   ->   StepParts, Report
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

from torch import fx, nn

from passes import Machine, PlanResult, Stream

from ..graph.draws.host_draws import draws_on_host
from ..graph.halves.partition import Partition, partition
from ..graph.rewrite import rewrite
from ..optim.offloaded_update import OffloadedStates
from ..optim.tier_slots import OffloadedSlots, TierSlot, tier_slots, unread_parameters
from ..options.compile_options import CompileOptions
from ..report.report import Report
from ..runtime.cuda_graph_checks import NOT_RECORDED, Recording, check_recording
from ..runtime.step_parts import StepParts
from ..runtime.undo import drawn_generators
from ..storage.tiers import open_tier
from ..system.page_pool import hold, why_not
from .lowering.lowering import NotLowered, lowering_of
from .optimizer_state import OptimizerState
from .pricing import op_profiler
from .step_graph import StepGraph


@dataclass(frozen=True, eq=False)
class AssembledStep:
    """The parts of a step, its report, and its compiled segments."""

    parts: StepParts
    report: Report
    lowering: NotLowered

    def stated(self) -> Report:
        """Return the report at the prices of the lowered step."""
        return replace(self.report, choice=self.lowering.restated(self.report.choice, self.report.machine))


@dataclass(frozen=True, eq=False)
class Assembly:
    """Makes the parts of one module's steps."""

    module: nn.Module
    options: CompileOptions
    state: OptimizerState

    def __call__(
        self, step: StepGraph, machine: Machine, result: PlanResult, began: float, split: str = ""
    ) -> AssembledStep:
        """Return the parts of the step that carries out a plan; planning began at `began` of `time.perf_counter`.

        With `split`, a reason, ops between memory ops are not compiled as one.

        Raises:
            RecordingError: the step has to be recorded, and can't be.
            LoweringError: all segments have to be compiled, and one can't be.
        """
        trace = result.forecast.trace
        halves = step.halves(trace)
        if halves is not None:
            return self._shared(step, machine, result, began, halves)
        step = step.with_numbers()
        target, options, captured = step.target, self.options, step.captured
        planned = rewrite(step.graph, trace)
        profiler = partial(op_profiler, step.inputs, self.state, target)
        lowering = lowering_of(planned, trace, profiler, options.lower, step.lowers, None if split else self.module)
        graph, lowered_trace = lowering.lowered(machine)
        lowered, apart_us = lowering.forecasts(lowered_trace, machine)
        slots = tier_slots(graph, captured)
        sizes, names = [slot.nbytes for slot in slots], [slot.tier for slot in slots]
        tier = open_tier(target.device, sizes, names, target.location)
        recording = self._recording(step, graph, result, machine.budget)
        report = Report(
            machine, result, planned_us=(time.perf_counter() - began) * 1e6, lowered=lowered, apart_us=apart_us,
            counted=options.optimizer is not None, uncompiled=lowering.refused, recorded=recording.note,
            op_by_op=lowering.op_by_op_nbytes(result.forecast), split=split or lowering.split,
            value_run=captured.value_run_nbytes, slices=captured.slices,
            whole=captured.whole_nbytes, row_blocks=captured.row_blocks, whole_weights=captured.whole_weights,
            no_pool=self._hold_pages(machine, result),
        )  # fmt: skip
        parts = replace(
            StepParts.of(captured, partition(graph, captured.graph, captured.floats), trace, tier),
            state_slots=self._state_slots(step, graph, result, slots),
            trained=step.trained.parameters,
            fused_update=self.state.fused_update,
            sharded_grads=self.state.sharded_grads,
            pending_gathers=self.state.pending_gathers,
            recording=recording,
            generators=drawn_generators(captured.graph, target.device),
            draws_on_host=draws_on_host(captured.graph.graph),
        )
        return AssembledStep(parts, report, lowering)

    def _shared(
        self, step: StepGraph, machine: Machine, result: PlanResult, began: float, halves: Partition
    ) -> AssembledStep:
        """Return the parts of a step without slots in the tier, whose code it shares with other lengths."""
        counted, traced = self.options.optimizer is not None, step.traced
        report = Report(
            machine,
            result,
            planned_us=(time.perf_counter() - began) * 1e6,
            counted=counted,
            no_pool=self._hold_pages(machine, result),
        )
        parts = replace(
            StepParts.of(step.captured, halves, result.forecast.trace),
            trained=step.trained.parameters,
            generators=drawn_generators(traced.graph, step.target.device),
            draws_on_host=draws_on_host(traced.graph.graph),
        )
        return AssembledStep(parts, report, NotLowered(step.graph, result.forecast.trace))

    def _hold_pages(self, machine: Machine, result: PlanResult) -> str:
        """Keep the pages of freed tensors for a step on a CPU, and return why a step with a plan can't keep them.

        With a plan it may take all of its budget; as it is, it keeps no more than it needs.
        """
        if machine.device != "cpu" or (not result.plan and why_not()):
            return ""
        hold(self.module, machine.budget if result.plan else result.forecast.peak)
        return why_not()

    def _recording(self, step: StepGraph, graph: fx.Graph, result: PlanResult, budget: int) -> Recording:
        if step.target.recorder is None:
            return NOT_RECORDED
        is_required = self.options.cuda_graphs is True
        return check_recording(step.captured, graph, result.forecast, budget, step.target.recorder, is_required)

    def _state_slots(
        self, step: StepGraph, graph: fx.Graph, result: PlanResult, slots: tuple[TierSlot, ...]
    ) -> OffloadedSlots | None:
        """Return the slots of parameters, gradients and optimizer state, if the plan offloads any."""
        streams = any(isinstance(decision, Stream) for decision in result.plan)
        if not streams and not step.captured.blocks and not any(slot.key for slot in slots):
            return None
        states = OffloadedStates.of(self.state.update, result.forecast.trace, step.trained.states)
        unread = unread_parameters(graph, step.captured)
        return OffloadedSlots(self.state.placement, slots, step.captured, states, unread)
