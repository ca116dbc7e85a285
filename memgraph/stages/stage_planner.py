"""Plan a stage within its bytes.

trace of the stage, bytes, open forwards    ->    plan, forecast

The graph of one pipeline stage, from the joint graph of a step and the trace of the stage.

a = mm(x, w)                        a = placeholder      received from the stage before
b = relu(a)                ->       b = relu(a)
ga = relu_backward(d, b)            ga = relu_backward(d, b)
gw = mm(x, ga)                      return ga            sent to the stage before

`summarize` of the result is the trace of the stage, so it is planned, rewritten and partitioned as any step is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, fx

from passes import Machine, PlanResult, Trace
from passes.concurrent_forwards import (
    fitting_beside,
    fitting_forwards,
    open_forward_nbytes,
    pending_gradient_nbytes,
    same_plan,
    smallest_plan,
    with_plan,
)
from passes.schedule.copy_timing import has_copies
from passes.stages.fixed_plans import recompute_all
from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.preceding import first_gradient_read, recompute_early
from passes.stages.rank_bytes import StageBytes
from passes.stages.timeline import StageTimes
from passes.stages.weights import first_weight_op, weight_ops, weights_last

from ..errors import CaptureError
from ..graph.accumulate_grads import accumulate_grads
from ..graph.captured import Input, Output
from ..graph.summarize import Cost, summarize
from ..profile.library_workspaces import add_library_workspaces
from ..storage.spill_file import Folder
from .planned_stage import PlannedStage, StagePlan, input_names
from .stage_budget import StageBudget
from .stage_cut import StageCut
from .stage_search import StageSearch

ROLES: dict[str, Literal["output", "input_gradient"]] = {"output": "output", "watched": "input_gradient"}
KINDS = {"auto": ("auto", "auto"), "always": ("always", "always"), "except_last": ("always", "never")}
ATTEMPTS = 3  # to make room for micro-batches that wait for the gradients of parameters


@dataclass(frozen=True, eq=False)
class StagePlanner:
    """Plans the stage `number` of a cut.

    Attributes:
        checkpoint: "auto", "always" or "never".
        spill_dir: the folder of what is offloaded.
        search: looks for better plans than the quick passes, which it begins with; None leaves it at these.
    """

    cut: StageCut
    number: int
    schedule: PipelineSchedule
    bytes_of: StageBudget
    device: torch.device
    checkpoint: str = "auto"
    spill_dir: Folder = None
    search: StageSearch | None = None

    def within(self, budget: int) -> StagePlanner:
        """Return the same planner, with another budget."""
        return replace(self, bytes_of=replace(self.bytes_of, budget=budget))

    @property
    def nominal(self) -> StagePlanner:
        """Return the planner of the quick passes for nominal prices: its plans are the same in each process."""
        return replace(self, cut=self.cut.nominal, search=None)

    @property
    def without_update(self) -> StagePlanner:
        """Return the same planner, for a rank that counts the update of all its stages."""
        return replace(self, bytes_of=replace(self.bytes_of, update=0))

    @property
    def plain(self) -> StagePlan:
        """Return the stage without decisions, whether it fits or not."""
        trace, fixed = self._priced(self._graph)
        return self._stage_plan(with_plan(trace, self._machine(1), self._forwards, ()), trace, fixed)[0]

    def plan(self, beside: StagePlan | None = None) -> StagePlan | None:
        """Return the plan; None if none fits.

        Args:
            beside: that of the stage for a larger micro-batch, whose forwards may be open as well: it is taken as it
                is, if the ops are the same.
        """
        return self._choose(self._graph, None if beside is None else beside.choice)

    def as_measured(self, plan: StagePlan) -> StagePlan:
        """Return a plan that was made with nominal prices with its forecast for measured ones, of the same bytes."""
        trace, fixed = self._priced(self._graph)
        choice = same_plan(trace, self._machine(1), self._forwards, plan.choice)
        assert choice is not None, "the ops are the same"
        return self._stage_plan(choice, trace, fixed)[0]

    def ready(self, plan: StagePlan) -> PlannedStage:
        """Return the stage with this plan, ready to run."""
        return PlannedStage.of(self.cut, self.number, self._graph, plan, self.spill_dir)

    def times(self) -> StageTimes:
        """Return the times of one micro-batch; infinite if no plan fits."""
        plan = self.plan()
        return StageTimes(float("inf"), float("inf")) if plan is None else plan.times

    def smallest(self, beside: StagePlan | None = None) -> StagePlan:
        """Return a plan of the quick passes that takes few bytes, whatever the budget is; `beside` as in `plan`."""
        trace, fixed = self._priced(self._graph)
        machine, count = self._machine(1), self._forwards
        if self.checkpoint != "auto":
            choice = self._searched(trace, machine, None)
        elif beside is None:
            choice = smallest_plan(trace, machine, count)
        elif (choice := same_plan(trace, machine, count, beside.choice)) is None:
            largest, room = open_forward_nbytes(beside.choice.forecast), self._machine(beside.peak - fixed)
            choice = fitting_beside(trace, room, count, largest, None) or smallest_plan(trace, machine, count)
        assert choice is not None, "only a search may find no plan"
        return self._stage_plan(choice, trace, fixed)[0]

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

    @property
    def _forwards(self) -> int:
        return self.schedule.open_forwards(self.number)

    def _choose(self, graph: fx.Graph, other: PlanResult | None = None) -> StagePlan | None:
        """Return the plan; None if none fits."""
        trace, fixed = self._priced(graph)
        pending = 0  # bytes of micro-batches that wait for the gradients of parameters
        for _ in range(ATTEMPTS):
            choice = self._searched(trace, self._machine(self.bytes_of.budget - fixed - pending), other)
            if choice is None:
                return None
            plan, needed = self._stage_plan(choice, trace, fixed)
            if plan.peak <= self.bytes_of.budget:
                return plan
            pending = needed
        return None

    def _priced(self, graph: fx.Graph) -> tuple[Trace, int]:
        """Return the trace of the stage, and the bytes that lie beside what is counted there.

        These are less than 0 where more is counted than lies there. Backward adds to gradients in place, so no further
        set of them is pending between two backwards, as in a module whose forwards are open at once. Open forwards have
        no tangents, as these are received by backward. And inputs are parts of the mini-batch, which counts as such.
        """
        ops = self.cut.step.trace.op
        trace = summarize(
            graph, lambda node: Cost(ops[node.name].us, ops[node.name].workspace) if node.name in ops else Cost()
        )
        others = self._forwards - 1 if trace.boundary < len(trace.ops) else 0
        tangents = sum(op.nbytes for op in trace.ops if op.fn == "tangent")
        absent = others * tangents + (others + 1) * self._given_nbytes
        absent += pending_gradient_nbytes(trace) if others else 0
        return add_library_workspaces(trace, self.device), self.bytes_of.others - absent

    @property
    def _given_nbytes(self) -> int:
        """Return the bytes of the stage's inputs that are parts of the mini-batch."""
        captured = self.cut.step.captured
        roles = dict(zip(input_names(captured), captured.inputs, strict=True))
        return sum(
            op.nbytes
            for op in self._trace.ops
            if op.fn == "input" and op.name in roles and roles[op.name].kind == "input"
        )

    def _machine(self, budget: int) -> Machine:
        """Return the machine; the open forwards of all stages of a rank share the room on its disk."""
        machine = self.cut.step.machine
        link = replace(machine.link, capacity=machine.link.capacity // (self._forwards * self.schedule.stages_per_rank))
        return replace(machine, budget=max(1, budget), device=str(self.device), link=link)

    def _searched(self, trace: Trace, machine: Machine, other: PlanResult | None) -> PlanResult | None:
        """Return the plan with which forwards may be open; None if none is found."""
        count = self._forwards
        if self.checkpoint == "never":
            return with_plan(trace, machine, count, ())
        if self.checkpoint == "always":
            choice = with_plan(trace, machine, count, recompute_all(trace, machine))
        else:
            known = other and same_plan(trace, machine, count, other)
            if known is not None:  # as it is: to recompute earlier would fill the room of the larger forwards
                return known
            until = float("inf") if self.search is None else self.search.until
            found = None
            if other is not None:
                found = fitting_beside(trace, machine, count, open_forward_nbytes(other.forecast), self.search)
            found = found or fitting_forwards(trace, machine, count, self.search, until)
            if found is None:
                return None
            choice = found
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
            more = open_forward_nbytes(choice.forecast, first) - open_forward_nbytes(choice.forecast, planned.boundary)
            needed = self.schedule.pending_weights(self.number) * max(0, more)
        is_last = self.number == self.schedule.stages - 1
        peak = max(choice.forecast.peak + fixed + needed, self.bytes_of.update)
        read = None if is_last else first_gradient_read(planned)
        weight = None if first is None else planned.ops[first].name
        alone = StageBytes.of(choice.forecast, self.bytes_of.others, self._given_nbytes)
        return StagePlan(choice, peak, alone, read, weight, self._sent_us), needed

    @property
    def _sent_us(self) -> tuple[float, float]:
        """Return how long the messages of a forward take, and those of a backward."""
        us, ranks = [0.0, 0.0], self.schedule.ranks
        for each in self.cut.messages:
            if each.sender == self.number and each.receiver % ranks != each.sender % ranks:
                us[each.receiver < each.sender] += self.cut.step.machine.network.us(each.nbytes)
        return us[0], us[1]


def checkpoint_kinds(checkpoint: str) -> tuple[str, str]:
    """Return how the micro-batches of a mini-batch are planned, and how the last of them is."""
    return KINDS.get(checkpoint, ("never", "never"))


def stage_graph(graph: fx.Graph, stage: Trace) -> fx.Graph:
    """Return the graph that runs the ops of `stage`, a trace that `passes.stages.stage_trace` made of `graph`'s own.

    Raises:
        CaptureError: the stage would receive a value that is not one tensor.
    """
    old, new = {node.name: node for node in graph.nodes}, fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for op in stage.ops:
        source = old[op.name]
        if op.is_input and source.op == "call_function":
            env[source] = _received(new, source, op.fn)
        else:
            env[source] = new.node_copy(source, env.__getitem__)
            env[source].meta = dict(source.meta)
    output = new.output(tuple(env[old[value]] for _, value in stage.outputs))
    output.meta = graph.output_node().meta | {"kinds": tuple(kind for kind, _ in stage.outputs)}
    new.lint()
    return new


def _received(new: fx.Graph, source: fx.Node, kind: str) -> fx.Node:
    """Add an input for a value of another stage, with the layout that it has there."""
    if not isinstance(source.meta["val"], Tensor):
        raise CaptureError(
            f"a pipeline stage can't begin behind {source.name} at {source.meta.get('where', '')}, whose value is sent "
            "and is not one tensor; choose another number of stages"
        )
    node = new.placeholder(source.name)
    node.meta = {"kind": kind, "val": source.meta["val"], "where": source.meta.get("where", "")}
    return node
