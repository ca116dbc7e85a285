"""A stage with its plan: what its rank runs for each micro-batch.

rewritten graph of a stage    ->    forward, and backward in up to three parts

A module in parts that run one after the other, with a pause in between.

b = relu(a)                 part 1:  b = relu(a)                -> b
c = mm(b, d)        ->      part 2:  c = mm(b, d)               -> c
return c                    d may come after part 1

Values are passed on by their names. A part lets go of those that no later part reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from passes import PlanResult
from passes.stages.rank_bytes import StageBytes
from passes.stages.timeline import StageTimes

from ..graph.captured import Captured
from ..graph.halves.partition import INPUTS_OF_BACKWARD, Partition, partition
from ..graph.nodes import named_placeholder, returned_values, tensors
from ..graph.rewrite import rewrite
from ..storage.places import Places
from ..storage.spill_file import Folder
from ..storage.tiers import Tier, open_tier
from ..system.device import CPU
from .stage_cut import StageCut

Run = Callable[[fx.GraphModule, list[Any]], Iterable[Any]]


@dataclass(frozen=True, eq=False)
class StagePlan:
    """The plan of a stage.

    Attributes:
        peak: forecast bytes of the rank, if it has this stage only.
        nbytes: those of the stage, while it runs and while another one does.
        first_read: the op before which backward waits for its gradients; None if they are there.
        first_weight: the op at which the gradients of parameters begin, if they have an action of their own.
        sent_us: until what forward sends has come, and what backward sends.
    """

    choice: PlanResult
    peak: int
    nbytes: StageBytes
    first_read: str | None
    first_weight: str | None
    sent_us: tuple[float, float]

    @property
    def times(self) -> StageTimes:
        """Return the forecast times of a micro-batch, with what it waits for copies."""
        forecast = self.choice.forecast
        begins = dict(zip((op.name for op in forecast.trace.ops), forecast.begins, strict=True))
        boundary = (*forecast.begins, forecast.us)[forecast.trace.boundary]
        weight = forecast.us if self.first_weight is None else begins[self.first_weight]
        read = boundary if self.first_read is None else begins[self.first_read]
        forward, recompute, backward, weights = boundary, read - boundary, weight - read, forecast.us - weight
        return StageTimes(forward, recompute + backward, weights, recompute, *self.sent_us)


@dataclass(frozen=True, eq=False)
class PlannedStage:
    """One stage, ready to run.

    Attributes:
        gradients: the parameters whose gradients backward adds to.
        input_gradients: gradients that backward returns, each with the input that it is the gradient of.
        outputs, results: names of what forward and backward return.
        tier: where it offloads values to; None if it offloads none.
    """

    cut: StageCut
    plan: StagePlan
    halves: Partition
    inputs: tuple[str, ...]
    gradients: tuple[str, ...]
    input_gradients: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    results: tuple[str, ...]
    recompute: ModulePart | None
    backward: ModulePart | None
    weights: ModulePart | None
    tier: Tier | None

    @classmethod
    def of(cls, cut: StageCut, stage: int, graph: fx.Graph, plan: StagePlan, spill_dir: Folder = None) -> PlannedStage:
        """Rewrite the graph of a stage by its plan."""
        trace = cut.traces[stage]
        planned = rewrite(graph, plan.choice.forecast.trace)
        slots = _slots(planned)
        halves = partition(planned, cut.step.captured.graph)
        placeholders = planned.find_nodes(op="placeholder")
        results = tuple(value for kind, value in trace.outputs if kind != "output")
        known = cut.step.input_gradients
        return cls(
            cut=cut,
            plan=plan,
            halves=halves,
            inputs=tuple(node.name for node in placeholders if node.meta["kind"] not in INPUTS_OF_BACKWARD),
            gradients=tuple(cut.gradient_names(trace)),
            input_gradients=tuple((name, known[name]) for name in results if name in known),
            outputs=tuple(value for kind, value in trace.outputs if kind == "output"),
            results=results,
            tier=open_tier(CPU, slots, [""] * len(slots), Places({"disk": spill_dir})),
            **_parts(halves, plan),
        )

    @property
    def arguments(self) -> list[str]:
        """Return the names of all inputs of the step."""
        return input_names(self.cut.step.captured)

    @property
    def tangents(self) -> tuple[str, ...]:
        """Return the names of the gradients that backward reads."""
        return self.halves.tangent_names

    def read_later(self, saved: Sequence[Any], gradients: Sequence[Tensor | None]) -> dict[str, Any]:
        """Return what backward is given, by name, without the tangents and what no op reads."""
        pairs = zip(self._given, (*saved, *gradients), strict=True)
        return {name: value for name, value in pairs if name in self._read}

    @cached_property
    def _given(self) -> list[str]:
        assert self.halves.backward is not None
        names = [node.name for node in self.halves.backward.graph.find_nodes(op="placeholder")]
        return [name for name in names if name not in self.tangents]

    @cached_property
    def _read(self) -> frozenset[str]:
        parts = (self.recompute, self.backward, self.weights)
        return frozenset(name for part in parts if part is not None for name in part.inputs)


def input_names(captured: Captured) -> list[str]:
    """Return the names of all inputs of a step."""
    return [node.name for node in captured.graph.graph.find_nodes(op="placeholder")]


def _slots(planned: fx.Graph) -> list[int]:
    """Return the bytes of each value that is offloaded, in the order of their slots."""
    offloads = planned.find_nodes(op="call_function", target=torch.ops.memgraph.offload.default)
    return [tensors(node.args[0])[0].nbytes for node in sorted(offloads, key=lambda node: node.args[1])]


def _parts(halves: Partition, plan: StagePlan) -> dict[str, ModulePart | None]:
    """Return backward in parts: what reads no gradient, what is sent, and what is not."""
    parts: dict[str, ModulePart | None] = dict.fromkeys(("recompute", "backward", "weights"))
    if halves.backward is None:
        return parts
    begins = {"recompute": None, "backward": plan.first_read, "weights": plan.first_weight}
    present = [name for name, begin in begins.items() if begin is not None]
    if plan.first_read is None:
        present.insert(0, "backward")
    else:
        present.insert(0, "recompute")
    made = module_parts(halves.backward, [begin for begin in begins.values() if begin is not None])
    return parts | dict(zip(present, made, strict=True))


@dataclass(frozen=True, eq=False)
class ModulePart:
    """One part.

    Attributes:
        inputs: names of what it reads.
        kept: those of them that a later part reads as well, or that the module returns.
        outputs: names of what it makes for later parts, or for the caller.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    kept: frozenset[str]
    outputs: tuple[str, ...]

    def run(self, values: dict[str, Any], run: Run) -> None:
        """Run the part: take what it reads from `values`, and put in what it makes."""
        inputs = [values[name] if name in self.kept else values.pop(name) for name in self.inputs]
        values.update(zip(self.outputs, run(self.module, inputs), strict=True))


def module_parts(module: fx.GraphModule, begins: Sequence[str]) -> tuple[ModulePart, ...]:
    """Return a module in parts: a new one begins at each node in `begins`."""
    parts: list[list[fx.Node]] = [[]]
    for node in module.graph.nodes:
        if node.name in begins:
            parts.append([])
        if node.op == "call_function":
            parts[-1].append(node)
    later = {node for node in returned_values(module.graph) if isinstance(node, fx.Node)}
    made: list[ModulePart] = []
    for nodes in reversed(parts):
        made.append(_part(module, nodes, later))
        later |= {source for node in nodes for source in node.all_input_nodes}
    return tuple(reversed(made))


def _part(module: fx.GraphModule, nodes: Sequence[fx.Node], later: set[fx.Node]) -> ModulePart:
    graph, own = fx.Graph(), set(nodes)
    graph.set_codegen(type(module.graph._codegen)())
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in own)
    inputs = [node for node in read if node.op != "get_attr"]
    env = {node: named_placeholder(graph, node.name) for node in inputs}
    for node in (*(source for source in read if source.op == "get_attr"), *nodes):
        env[node] = graph.node_copy(node, env.__getitem__)
    outputs = [node for node in nodes if node in later]
    graph.output(tuple(env[node] for node in outputs))
    kept = frozenset(node.name for node in inputs if node in later)
    names = tuple(node.name for node in inputs)
    return ModulePart(fx.GraphModule(module, graph), names, kept, tuple(node.name for node in outputs))
