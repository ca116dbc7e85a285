"""The graph of a step -> its trace with prices, and the machine that it is planned for.

mm: 512 x 512   ->   mm  # 10 us, workspace 4096          links   ->   Machine(budget, out=880 bytes/us, ...)

Times of a step's ops, scaled from a step of the same ops with another length.

mm: reads and makes 128 kB, 40 us   ->   mm: reads and makes 96 kB, 30 us

Only times are: bytes follow from the graph, and workspaces are measured for each length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import fx, nn

from passes import Link, Machine, Op, Streaming, Trace, proven_nbytes
from passes.concurrent_forwards import unplanned_nbytes
from passes.cuda_graph_memory import add_recording_memory
from passes.order.comm_order import place_collectives

from ..optim.update_cost import with_windows
from ..options.compile_options import CompileOptions
from ..profile.library_workspaces import add_library_workspaces, libraries_nbytes
from ..profile.link_bandwidth import sizes_of
from ..profile.machine_profile import measure_tiers
from ..profile.measuring_room import batch_nbytes, rates_room, room_nbytes
from ..profile.op_profiler import OpProfiler
from ..system.device import unused_nbytes
from ..system.page_pool import hold
from .accumulated_step import with_remaining_grads
from .lowering.lowering import lowering_of
from .optimizer_state import OptimizerState
from .progress import Progress
from .step_graph import StepGraph
from .target import Target


@dataclass(frozen=True, eq=False)
class Pricing:
    """Measures what steps of one call cost.

    Attributes:
        until: when planning has to end, in seconds of `time.monotonic`.
        doubts: shares of the ops' time whose prices other work of the machine has disturbed, of each timed step.
        nearby: the priced trace of the same ops with another length, for times.
        for_any_budget: True to measure what only a plan needs although the step fits the budget of the options.
    """

    module: nn.Module
    options: CompileOptions
    state: OptimizerState
    progress: Progress
    until: float = math.inf
    nearby: Trace | None = None
    for_any_budget: bool = False
    doubts: list[float] = field(default_factory=list)

    def __call__(self, step: StepGraph) -> tuple[Trace, Machine]:
        """Return the priced trace and the machine; ranks that plan together get the same.

        Raises:
            LayoutsDiffer: a step made of one with symbols has to be made of its own graph.
        """
        target, ranks = step.target, step.ranks
        machine = Machine(ranks.least_budget(target.budget), str(target.device))
        plain = step.summarize()
        machine = ranks.with_network(machine, _room(step.inputs, self.state, target))
        with ranks.reporting_errors():
            libraries_nbytes(target.device)  # loads them before anything is measured
            # Times are for plans.  A step that fits needs none, but all ranks have to measure alike.
            times = self._needs_plan(plain, machine, machine.budget) or step.lowers or ranks.plan_together
            hopeless = self._is_hopeless(step, plain, machine)
            times = times and not self._scales(step) and not hopeless
            profiler = op_profiler(step.inputs, self.state, target, self.until, times, self.progress)
            if target.device.type == "cpu" and self._needs_plan(plain, machine, target.budget):
                hold(profiler, target.budget)  # while it lives: ops are timed as in a step that needs a plan
            trace = self._trace(step, machine, profiler)
        trace = ranks.share_trace(trace)
        if self._needs_plan(trace, machine, machine.budget):
            trace, machine = self._with_links(step, trace, machine, profiler, hopeless)
        return trace, ranks.share_machine(machine)

    def _is_hopeless(self, step: StepGraph, plain: Trace, machine: Machine) -> bool:
        """Return True if no plan fits, as the text without prices shows: then no time is measured, as none counts.

        Ranks measure alike, whatever one of them knows.
        """
        if self.for_any_budget or step.lowers or step.ranks.plan_together or self.options.plans:
            return False
        best = replace(machine, link=Link(1.0, 1.0), streaming=Streaming(True)) if step.target.tiers else machine
        return proven_nbytes(plain, best) > machine.budget

    def _needs_plan(self, trace: Trace, machine: Machine, budget: int) -> bool:
        return self.for_any_budget or unplanned_nbytes(trace, machine, self.options.forwards) > budget

    def _trace(self, step: StepGraph, machine: Machine, profiler: OpProfiler) -> Trace:
        """Return the step as it is without a plan, with prices, workspaces and optimizer state."""
        self.progress.phase("pricing ops", len(step.graph.nodes))
        with profiler.together(step.priced):
            step.correct_layouts(profiler.layouts)
            summarized = step.summarize(profiler)
        trace = place_collectives(summarized, not machine.network.overlaps_comm)
        trace = add_library_workspaces(trace, step.target.device)
        trace = self.state.with_others(self._with_held(trace, step), step.captured)
        trace = self.state.add_update(trace, step.graph, step.trained)
        if self.options.cuda_graphs is True:
            trace = add_recording_memory(trace)
        if step.ranks.plan_together or self.options.plans:
            return trace
        return with_remaining_grads(trace, self.module, step.trained.parameters)

    def _with_held(self, trace: Trace, step: StepGraph) -> Trace:
        """Return the trace with the parameters that stay on the device as buffers."""
        held, roles = self.state.held_parameters(), step.captured.graph_inputs
        names = {
            node.name
            for node, role in zip(step.inputs, roles, strict=False)
            if role.kind == "parameter" and role.name in held
        }
        ops = (replace(op, fn="buffer") if op.name in names else op for op in trace.ops)
        return replace(trace, ops=tuple(ops)) if names else trace

    def _scales(self, step: StepGraph) -> bool:
        """Return True if times are those of another length; compiled segments are timed for each."""
        return self.nearby is not None and not step.lowers and not step.ranks.plan_together

    def _with_links(
        self, step: StepGraph, trace: Trace, machine: Machine, profiler: OpProfiler, hopeless: bool
    ) -> tuple[Trace, Machine]:
        """Return trace and machine with what only a plan needs: times, segments, links and windows.

        Nothing is timed for a step that is `hopeless`, and its links are guessed.
        """
        if self._scales(step) and self.nearby is not None:
            trace = scaled_times(trace, self.nearby)
        elif not profiler.times and not hopeless:
            trace = profiler.timed(trace, step.summarize)
        if not hopeless:
            self.doubts.append(profiler.doubt)
        lowering = lowering_of(step.graph, trace, lambda: profiler, self.options.lower, step.lowers)
        trace, target, options = lowering.shared(), step.target, self.options
        with step.ranks.reporting_errors():
            sizes = sizes_of(trace, machine.budget)
            room = 0 if hopeless else rates_room(profiler.room, target.budget)
            links = target.tiers, target.device, target.location, sizes, options.wire_dtype, room
            machine = measure_tiers(machine, *links)
            if options.cuda_graphs is not True:  # offloading state is work of the host, which no recording repeats
                machine = self.state.with_offloaded_state(machine, step.trained)
        if step.captured.blocks:
            trace = with_windows(trace, machine.streaming.window)
        return trace if hopeless else self.state.price_update(trace, machine, step.trained), machine


def op_profiler(
    inputs: Iterable[fx.Node], state: OptimizerState, target: Target, until: float = math.inf, times: bool = True,
    progress: Progress | None = None,
) -> OpProfiler:  # fmt: skip
    """Return a profiler for a step with these inputs that takes at most half of the device's free memory."""
    room = _room(inputs, state, target)
    counted = progress.done if progress is not None else int
    most = unused_nbytes(target.device) // 2
    return OpProfiler(most, room, until, times=times, counted=counted, fixed_modes=True)


def _room(inputs: Iterable[fx.Node], state: OptimizerState, target: Target) -> int:
    """Return the bytes that the budget leaves for measurements."""
    return room_nbytes(target.budget, target.device, state.resident_nbytes(), batch_nbytes(inputs))


def scaled_times(trace: Trace, known: Trace) -> Trace:
    """Return the trace with times in proportion to those of `known`; an op that it lacks keeps its own."""
    before, touched = known.op, _touched(known)
    now = _touched(trace)

    def scaled(op: Op) -> Op:
        like = before.get(op.name)
        if like is None or like.fn != op.fn or not touched[op.name]:
            return op
        return replace(op, us=round(like.us * now[op.name] / touched[op.name], 1))

    return replace(trace, ops=tuple(map(scaled, trace.ops)))


def _touched(trace: Trace) -> dict[str, int]:
    """Return the bytes of what each op reads and makes."""
    held = {op.name: sum(trace.nbytes.get(storage, 0) for storage in op.holds) for op in trace.ops}
    return {op.name: held[op.name] + sum(held.get(read, 0) for read in op.reads) for op in trace.ops}
