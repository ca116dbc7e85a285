"""Plan a stage within its bytes.

trace of the stage, bytes, open forwards    ->    plan, forecast
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import fx

import passes
from passes import Machine, PlanResult, Trace, make_plan
from passes.concurrent_forwards import (
    open_forward_nbytes,
    pending_gradient_nbytes,
    plan_forwards,
    same_plan,
    with_plan,
)
from passes.schedule.copy_timing import has_copies
from passes.stages.fixed_plans import recompute_all
from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.preceding import first_gradient_read, recompute_early
from passes.stages.timeline import StageTimes
from passes.stages.weights import first_weight_op, weight_ops, weights_last

from ..errors import BudgetError
from ..graph.accumulate_grads import accumulate_grads
from ..graph.captured import Input, Output
from ..graph.stage_graph import stage_graph
from ..graph.summarize import Cost, summarize
from ..profile.library_workspaces import add_library_workspaces
from ..storage.spill_file import Folder
from .planned_stage import PlannedStage, StagePlan, input_names
from .stage_budget import StageBudget
from .stage_cut import StageCut

ROLES: dict[str, Literal["output", "input_gradient"]] = {"output": "output", "watched": "input_gradient"}
KINDS = {"auto": ("auto", "auto"), "always": ("always", "always"), "except_last": ("always", "never")}
ATTEMPTS = 3  # to make room for micro-batches that wait for the gradients of parameters


@dataclass(frozen=True, eq=False)
class StagePlanner:
    """Plans the stage `number` of a cut.

    Attributes:
        checkpoint: "auto", "always" or "never".
        spill_dir: the folder of what is offloaded.
    """

    cut: StageCut
    number: int
    schedule: PipelineSchedule
    bytes_of: StageBudget
    device: torch.device
    checkpoint: str = "auto"
    spill_dir: Folder = None

    def within(self, budget: int) -> StagePlanner:
        """Return the same planner, with another budget."""
        return replace(self, bytes_of=replace(self.bytes_of, budget=budget))

    def plan(self, beside: PlannedStage | None = None) -> PlannedStage:
        """Return the stage, ready to run.

        Args:
            beside: the stage for a larger micro-batch, whose forwards may be open as well: it has the same plan, if
                the ops are the same.

        Raises:
            BudgetError: no plan fits; `smallest` is that of the stage.
        """
        graph = self._graph
        plan = self._choose(graph, None if beside is None else beside.plan.choice)
        return PlannedStage.of(self.cut, self.number, graph, plan, self.spill_dir)

    def times(self) -> StageTimes:
        """Return the times of one micro-batch; infinite if no plan fits."""
        try:
            return self._choose(self._graph).times
        except BudgetError:
            return StageTimes(float("inf"), float("inf"))

    def smallest(self) -> int:
        """Return the smallest budget for which a plan is found."""
        try:
            return self.within(1)._choose(self._graph).peak
        except BudgetError as error:
            return error.smallest

    @property
    def _trace(self) -> Trace:
        trace = self.cut.traces[self.number]
        return weights_last(trace) if self.schedule.name == "zero_bubble" else trace

    @property
    def _graph(self) -> fx.Graph:
        """The graph of the stage, which adds to existing gradients."""
        step, trace = self.cut.step, self._trace
        whole, graph = step.captured, stage_graph(step.captured.graph.graph, trace)
        known = dict(zip(input_names(whole), whole.inputs, strict=True))
        inputs = tuple(known.get(node.name) or Input(node.meta["kind"]) for node in graph.find_nodes(op="placeholder"))
        names = iter(self.cut.gradient_names(trace))
        outputs = tuple(
            Output("gradient", next(names)) if kind == "gradient" else Output(ROLES[kind]) for kind, _ in trace.outputs
        )
        stage = replace(whole, graph=fx.GraphModule(whole.graph, graph), inputs=inputs, outputs=outputs)
        return accumulate_grads(stage, ())

    def _choose(self, graph: fx.Graph, other: PlanResult | None = None) -> StagePlan:
        """Return the plan.

        Backward adds to gradients in place, so no further set of them is pending between two backwards, as in a module
        whose forwards are open at once.
        """
        ops, count = self.cut.step.trace.op, self.schedule.open_forwards(self.number)
        trace = summarize(
            graph, lambda node: Cost(ops[node.name].us, ops[node.name].workspace) if node.name in ops else Cost()
        )
        several = count > 1 and trace.boundary < len(trace.ops)
        fixed = self.bytes_of.others - (pending_gradient_nbytes(trace) if several else 0)
        trace = add_library_workspaces(trace, self.device)
        pending = 0  # bytes of micro-batches that wait for the gradients of parameters
        for _ in range(ATTEMPTS):
            machine = replace(self._machine(count), budget=max(1, self.bytes_of.budget - fixed - pending))
            try:
                choice = self._searched(trace, machine, count, other)
            except passes.BudgetError as error:
                raise self._too_small(max(error.smallest + fixed + pending, self.bytes_of.update)) from None
            plan, needed = self._stage_plan(choice, trace, fixed)
            if plan.peak <= self.bytes_of.budget:
                return plan
            pending = needed
        raise self._too_small(plan.peak)

    def _machine(self, count: int) -> Machine:
        """Return the machine; the open forwards of all stages of a rank share the room on its disk."""
        machine = self.cut.step.machine
        link = replace(machine.link, capacity=machine.link.capacity // (count * self.schedule.stages_per_rank))
        return replace(machine, device=str(self.device), link=link)

    def _searched(self, trace: Trace, machine: Machine, count: int, other: PlanResult | None) -> PlanResult:
        """Return the plan with which `count` forwards may be open."""
        if self.checkpoint == "never":
            return with_plan(trace, machine, count, ())
        if self.checkpoint == "always":
            choice = with_plan(trace, machine, count, recompute_all(trace, machine))
        else:
            known = other and same_plan(trace, machine, count, other)
            if known is not None:  # as it is: to recompute earlier would fill the room of the larger forwards
                return known
            choice = plan_forwards(trace, machine, count, make_plan)
        if self.number == self.schedule.stages - 1 or has_copies(choice.plan):  # what it recomputes may be reloaded
            return choice
        forecast = partial(with_plan, choice.captured.trace, machine, count)
        return recompute_early(choice, machine.budget, forecast)

    def _stage_plan(self, choice: PlanResult, trace: Trace, fixed: int) -> tuple[StagePlan, int]:
        """Return the plan, and the bytes of micro-batches that wait for the gradients of parameters."""
        planned, needed, first = choice.forecast.trace, 0, None
        if self.schedule.name == "zero_bubble":
            first = first_weight_op(planned, weight_ops(trace))
        if first is not None:
            more = open_forward_nbytes(choice.forecast, first) - open_forward_nbytes(choice.forecast)
            needed = self.schedule.pending_weights(self.number) * max(0, more)
        is_last = self.number == self.schedule.stages - 1
        peak = max(choice.forecast.peak + fixed + needed, self.bytes_of.update)
        read = None if is_last else first_gradient_read(planned)
        weight = None if first is None else planned.ops[first].name
        return StagePlan(choice, peak, read, weight, self._sent_us), needed

    @property
    def _sent_us(self) -> tuple[float, float]:
        """Return how long the messages of a forward take, and those of a backward."""
        us, ranks = [0.0, 0.0], self.schedule.ranks
        for each in self.cut.messages:
            if each.sender == self.number and each.receiver % ranks != each.sender % ranks:
                us[each.receiver < each.sender] += self.cut.step.machine.network.us(each.nbytes)
        return us[0], us[1]

    def _too_small(self, least: int) -> BudgetError:
        stage, allowed = f"stage {self.number} of {self.schedule.stages}", self.bytes_of.budget
        return BudgetError(f"{stage} needs {least} bytes, and {allowed} are allowed", allowed, least)


def checkpoint_kinds(checkpoint: str) -> tuple[str, str]:
    """Return how the micro-batches of a mini-batch are planned, and how the last of them is."""
    return KINDS.get(checkpoint, ("never", "never"))
