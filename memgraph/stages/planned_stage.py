"""A stage with its plan: the halves that its rank runs for each micro-batch.

trace of the stage, bytes, open forwards    ->    plan    ->    rewritten graph    ->    forward, backward
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

import passes
from passes import Machine, PlanResult, Trace, make_plan
from passes.concurrent_forwards import open_forward_nbytes, pending_gradient_nbytes, plan_forwards, same_plan

from ..errors import BudgetError
from ..graph.accumulate_grads import accumulate_grads
from ..graph.captured import Captured, Input, Output
from ..graph.partition import INPUTS_OF_BACKWARD, Partition, partition
from ..graph.rewrite import rewrite
from ..graph.stage_graph import stage_graph
from ..graph.summarize import Cost, summarize
from ..profile.library_workspaces import add_library_workspaces
from .action_order import StageOrder
from .stage_budget import StageBudget
from .stage_cut import StageCut

ROLES: dict[str, Literal["output", "input_gradient"]] = {"output": "output", "watched": "input_gradient"}


@dataclass(frozen=True, eq=False)
class PlannedStage:
    """One stage, ready to run.

    Attributes:
        inputs, tangents: names of what forward reads, and of the gradients that backward reads.
        arguments: names of all inputs of the step.
        gradients: the parameters whose gradients backward adds to.
        outputs, results: names of what forward and backward return.
        peak: forecast bytes of the rank.
    """

    cut: StageCut
    halves: Partition
    arguments: tuple[str, ...]
    inputs: tuple[str, ...]
    tangents: tuple[str, ...]
    gradients: tuple[str, ...]
    outputs: tuple[str, ...]
    results: tuple[str, ...]
    choice: PlanResult
    peak: int

    @property
    def open_nbytes(self) -> int:
        """Return the bytes that an open forward holds."""
        return open_forward_nbytes(self.choice.forecast)


@dataclass(frozen=True, eq=False)
class StagePlanner:
    """Plans the stage of `order` in a cut, within its bytes."""

    cut: StageCut
    order: StageOrder
    bytes_of: StageBudget
    device: torch.device

    def plan(self, beside: PlannedStage | None = None) -> PlannedStage:
        """Return the stage, ready to run.

        Args:
            beside: the stage for a larger micro-batch, whose forwards may be open as well: it has the same plan, if
                the ops are the same.

        Raises:
            BudgetError: no plan fits; `smallest` is that of the rank.
        """
        graph = self._graph
        choice, peak = self._choose(graph, None if beside is None else beside.choice)
        planned = rewrite(graph, choice.forecast.trace)
        placeholders = planned.find_nodes(op="placeholder")
        return PlannedStage(
            cut=self.cut,
            halves=partition(planned, self.cut.step.captured.graph),
            arguments=tuple(input_names(self.cut.step.captured)),
            inputs=tuple(node.name for node in placeholders if node.meta["kind"] not in INPUTS_OF_BACKWARD),
            tangents=tuple(node.name for node in placeholders if node.meta["kind"] == "tangent"),
            gradients=tuple(self.cut.gradient_names(self._trace)),
            outputs=tuple(value for kind, value in self._trace.outputs if kind == "output"),
            results=tuple(value for kind, value in self._trace.outputs if kind != "output"),
            choice=choice,
            peak=peak,
        )

    def us(self) -> float:
        """Return the time for one micro-batch; infinite if no plan fits."""
        try:
            return self._choose(self._graph)[0].forecast.us
        except BudgetError:
            return float("inf")

    def smallest(self) -> int:
        """Return the smallest budget for which a plan is found."""
        try:
            return replace(self, bytes_of=replace(self.bytes_of, budget=1))._choose(self._graph)[1]
        except BudgetError as error:
            return error.smallest

    @property
    def _trace(self) -> Trace:
        return self.cut.traces[self.order.stage]

    @property
    def _graph(self) -> fx.Graph:
        """The graph of the stage, which adds to existing gradients."""
        step = self.cut.step
        whole, graph = step.captured, stage_graph(step.captured.graph.graph, self._trace)
        known = dict(zip(input_names(whole), whole.inputs, strict=True))
        inputs = tuple(known.get(node.name) or Input(node.meta["kind"]) for node in graph.find_nodes(op="placeholder"))
        names = iter(self.cut.gradient_names(self._trace))
        outputs = tuple(
            Output("gradient", next(names)) if kind == "gradient" else Output(ROLES[kind])
            for kind, _ in self._trace.outputs
        )
        stage = replace(whole, graph=fx.GraphModule(whole.graph, graph), inputs=inputs, outputs=outputs)
        return accumulate_grads(stage, ())

    def _choose(self, graph: fx.Graph, other: PlanResult | None = None) -> tuple[PlanResult, int]:
        """Return the plan, and the forecast bytes of the rank.

        Backward adds to gradients in place, so no further set of them is pending between two backwards, as in a module
        whose forwards are open at once.
        """
        ops = self.cut.step.trace.op
        trace = summarize(
            graph, lambda node: Cost(ops[node.name].us, ops[node.name].workspace) if node.name in ops else Cost()
        )
        several = self.order.open_forwards > 1 and trace.boundary < len(trace.ops)
        fixed = self.bytes_of.others - (pending_gradient_nbytes(trace) if several else 0)
        machine = Machine(max(1, self.bytes_of.budget - fixed), str(self.device))
        trace = add_library_workspaces(trace, self.device)
        count = self.order.open_forwards
        try:
            choice = other and same_plan(trace, machine, count, other)
            choice = choice or plan_forwards(trace, machine, count, make_plan)
        except passes.BudgetError as error:
            raise self._too_small(max(error.smallest + fixed, self.bytes_of.update)) from None
        peak = max(choice.forecast.peak + fixed, self.bytes_of.update)
        if peak > self.bytes_of.budget:
            raise self._too_small(peak)
        return choice, peak

    def _too_small(self, least: int) -> BudgetError:
        stage, allowed = f"stage {self.order.stage} of {self.order.stages}", self.bytes_of.budget
        return BudgetError(f"{stage} needs {least} bytes, and {allowed} are allowed", allowed, least)


def input_names(captured: Captured) -> list[str]:
    """Return the names of all inputs of a step."""
    return [node.name for node in captured.graph.graph.find_nodes(op="placeholder")]
