"""A planned graph -> the same graph with segments of it compiled by Inductor.

    %add : add(%x, %r)                              %add_segment : segment(%x, %r, %w, %b)
    %n   : native_layer_norm(%add, %w, %b)    ->    %add : getitem(%add_segment, 0)
    %n_0 : getitem(%n, 0)                           %n_0 : getitem(%add_segment, 1)

`passes/segments.py` finds the segments in a trace.

Compile all ops of a half between two memory ops as one: what a region is, whether it can be used, and its price.

forward: 340 ops, no memory op    ->   one region, 0.9 of their time, 4 MB below their peak

Regions are segments (`passes/segments.py`) of whatever Inductor may compile, products included. A memory op stays where
the plan has it, in the code of the half. So do ops that draw random numbers, whose order Inductor does not keep.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes import Forecast, Machine, Op, PlanResult, Trace, predict
from passes.segments import (
    Price,
    Segment,
    affordable_segments,
    faster_regions,
    find_regions,
    find_segments,
    fuse_segments,
    outside_of,
    over_budget,
    split_region,
    spread_segment_times,
)
from passes.simulate.plan_result import with_higher_costs

from ...errors import LoweringError
from ...graph import inductor
from ...graph.float_arguments import float_arguments
from ...graph.nodes import all_storages, is_random, storages, tensors
from ...graph.result_layout import empty_like, layout, layout_in_storage
from ...graph.rewrite import Rewriter
from ...graph.summarize import draws
from ...profile.op_profiler import OpProfiler
from ...profile.region_profiler import RegionProfiler
from ...profile.step_timer import StepTimes
from ...storage.mapped_storage import is_offloaded

# Inductor fuses these too, though torch does not tag them as pointwise.
FUSED = frozenset({
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "sum", "mean", "var", "var_mean",
    "amax", "amin", "_to_copy", "clone", "where", "full_like", "zeros_like", "ones_like", "cat", "expand",
})  # fmt: skip
LEAST = 16  # ops that compute, in a part of a region
_refused: dict[str, str] = {}  # why Inductor could not compile a region, by its digest


class NotLowered:
    """Every op runs on its own, as captured."""

    refused = 0  # segments that can't be compiled
    split = ""  # why ops between memory ops are not compiled as one

    def __init__(self, graph: fx.Graph, trace: Trace) -> None:
        self.graph, self.trace = graph, trace

    def shared(self) -> Trace:
        """Return the trace at the prices that ops have inside segments."""
        return self.trace

    def lowered(self, machine: Machine) -> tuple[fx.Graph, Trace]:
        """Return graph and trace with all segments that are faster than their ops and fit the budget."""
        return self.graph, self.trace

    def forecasts(self, trace: Trace, machine: Machine) -> tuple[Forecast | None, float]:
        """Return the forecast of a lowered trace, and the microseconds of the same ops without segments."""
        return None, 0.0

    def op_by_op_nbytes(self, forecast: Forecast) -> int:
        """Return the peak where a loss of only some outputs runs compiled ops one by one; 0 if it can't."""
        return 0

    def restated(self, choice: PlanResult, machine: Machine) -> PlanResult:
        """Return the plan's result at the prices of the lowered step."""
        return choice

    def split_times(self, times: StepTimes) -> StepTimes:
        """Return the times of ops, where segments were measured as wholes."""
        return times


class Lowering(NotLowered):
    """The segments of one step, compiled and priced.

    With `must`, a segment that can't be compiled is an error; otherwise its ops run one by one. With `module`, whose
    step this is, all ops between two memory ops are compiled as one, if that is faster and fits.
    """

    def __init__(
        self, graph: fx.Graph, trace: Trace, profiler: OpProfiler, must: bool = True, module: nn.Module | None = None
    ) -> None:
        self.nodes = {node.name: node for node in graph.nodes}
        candidates = find_segments(trace, lambda op: _is_fusible(self.nodes[op.name]))
        super().__init__(graph, self._priced_alone(trace, candidates, profiler))
        self.run = inductor.compile_segments({each.name: self._subgraph(each) for each in candidates}, must)
        self.refused = len(candidates) - len(self.run)
        priced = {each.name: self._price(each, profiler) for each in candidates if each.name in self.run}
        self.prices = {name: price for name, price in priced.items() if price is not None}
        self.segments = tuple(each for each in candidates if each.name in self.prices)
        self.chosen: tuple[Segment, ...] = ()
        self.regions: Callable[..., Regions] = no_regions
        if module is not None:
            on_device = [x for x in (*module.parameters(), *module.buffers()) if not is_offloaded(x)]
            own = RegionProfiler(on_device, profiler.limit)
            self.regions = RegionCompiler(self.nodes, self._subgraph, own)

    def shared(self) -> Trace:
        return spread_segment_times(self.trace, self.segments, self.prices)

    def lowered(self, machine: Machine) -> tuple[fx.Graph, Trace]:
        segments = affordable_segments(self.trace, machine, self.segments, self.prices)
        regions = self.regions(self.trace, machine, segments, self.prices)
        self.chosen, self.split = (*regions.chosen, *outside_of(regions.chosen, segments)), regions.split
        trace = fuse_segments(self.trace, self.chosen, {**self.prices, **regions.prices})
        return _WithSegments(self.graph, {**self.run, **regions.run}, self.chosen).rewrite(trace), trace

    def forecasts(self, trace: Trace, machine: Machine) -> tuple[Forecast | None, float]:
        return predict(trace, machine), predict(self.trace, machine).us

    def op_by_op_nbytes(self, forecast: Forecast) -> int:
        tangents = sum(op.fn == "tangent" for op in forecast.trace.ops)
        return forecast.peak if self.chosen and tangents > 1 else 0

    def restated(self, choice: PlanResult, machine: Machine) -> PlanResult:
        """An op in no segment takes its own time, however cheap it was planned to be inside one."""
        inside = {name for segment in self.chosen for name in segment.ops}
        return with_higher_costs(choice, machine, {op.name: op.us for op in self.trace.ops if op.name not in inside})

    def split_times(self, times: StepTimes) -> StepTimes:
        """Each op gets its share of what its segment took."""
        us = dict(times.ops)
        for segment in self.chosen:
            alone = sum(self.trace.op[name].us for name in segment.ops) or 1.0
            took = times.ops.get(segment.name, 0.0)
            us |= {name: self.trace.op[name].us / alone * took for name in segment.ops}
        return replace(times, ops=us)

    def _priced_alone(self, trace: Trace, candidates: Iterable[Segment], profiler: OpProfiler) -> Trace:
        """Return the trace with the times that ops of segments take on their own.

        The plan was made at their prices inside segments, and at those no segment is faster than its ops.  That also
        holds for fusible ops that the plan has cut off from every segment.
        """
        us = {name: profiler(self.nodes[name]).us for segment in candidates for name in segment.ops}
        others = [op for op in trace.ops if op.name not in us and op.phase != "update"]
        fusible = [op for op in others if op.name in self.nodes and _is_fusible(self.nodes[op.name])]
        us |= {op.name: max(op.us, profiler(self.nodes[op.name]).us) for op in fusible}
        return replace(trace, ops=tuple(replace(op, us=us.get(op.name, op.us)) for op in trace.ops))

    def _inputs(self, segment: Segment) -> tuple[fx.Graph, dict[str, fx.Node]]:
        """Return a new graph with the inputs of a segment, and those by name."""
        graph = fx.Graph()
        inputs = {read: graph.placeholder(read) for read in segment.reads}
        for read, node in inputs.items():
            node.meta = {"val": self.nodes[read].meta["val"]}
        return graph, inputs

    def _subgraph(self, segment: Segment) -> fx.Graph:
        graph, inputs = self._inputs(segment)
        env = {self.nodes[read]: node for read, node in inputs.items()}
        for name in segment.ops:
            source = self.nodes[name]
            if all(read in env for read in source.all_input_nodes):
                env[source] = graph.node_copy(source, env.__getitem__)
        graph.output(tuple(env[self.nodes[value]] for value in segment.outputs))
        graph.eliminate_dead_code()
        return graph

    def _price(self, segment: Segment, profiler: OpProfiler) -> Price | None:
        """Return the price of a segment; None if it can't run here, or its results differ from the graph's."""
        graph, inputs = self._inputs(segment)
        node = graph.create_node("call_function", self.run[segment.name], tuple(inputs.values()), name=segment.name)
        expected = [tensors(self.nodes[value])[0] for value in segment.outputs]
        node.meta = {"val": tuple(expected)}
        results = profiler.layouts(node)
        layouts = [(layout(value), 0) for value in expected]
        if results is None or [(result.layout, result.offset) for result in results] != layouts:
            return None
        cost = profiler(node)
        return Price(cost.us, cost.workspace)


def lowering_of(
    graph: fx.Graph, trace: Trace, profiler: Callable[[], OpProfiler], option: str | None, lowers: bool,
    module: nn.Module | None = None,
) -> NotLowered:  # fmt: skip
    """Return the segments of a step if it `lowers`; with the option "inductor" all of them have to compile.

    Give the module if the step will run, and not only be planned.
    """
    if not lowers:
        return NotLowered(graph, trace)
    return Lowering(graph, trace, profiler(), option == "inductor", module)


class _WithSegments(Rewriter):
    """Rewrites a graph for a trace in which some ops are segments."""

    def __init__(self, graph: fx.Graph, run: Mapping[str, inductor.Segment], chosen: Iterable[Segment]) -> None:
        super().__init__(graph)
        self.run = run
        self.by_name = {each.name: each for each in chosen}

    def _compute(self, op: Op) -> fx.Node:
        if not op.reads or op.reads[0] not in self.by_name:
            return super()._compute(op)
        whole, place = self.env[op.reads[0]], self.by_name[op.reads[0]].outputs.index(op.name)
        return self._fresh(op, operator.getitem, (whole, place), whole.meta["val"][place])

    def _memory_op(self, op: Op) -> fx.Node:
        sources = [tensors(self.old[value])[0] for value in self.by_name[op.name].outputs]
        value = tuple(empty_like(source, self.mode) for source in sources)
        return self._fresh(op, self.run[op.name], tuple(self.env[read] for read in op.reads), value)

    def _fresh(self, op: Op, target: Callable[..., object], args: tuple[Any, ...], value: object) -> fx.Node:
        node = self.new.create_node("call_function", target, args)
        node.meta = {"phase": op.phase, "section": op.section, "part": op.microbatch, "where": op.where, "val": value}
        self.fresh.add(node)
        return self._named(node, op)


def _is_fusible(node: fx.Node) -> bool:
    """Return True if an op computes element by element or along rows, into tensors of its own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    name = target._schema.name.removeprefix("aten::")
    if (torch.Tag.pointwise not in target.tags and name not in FUSED) or float_arguments(node):
        return False
    inputs = [source.meta.get("val") for source in node.all_input_nodes]
    if not all(isinstance(value, Tensor) for value in inputs) or not tensors(node):
        return False
    return storages(node).isdisjoint(all_storages(node.all_input_nodes))


@dataclass(frozen=True)
class Regions:
    """The regions that are used, what runs them and their prices by name, and why other ops are not compiled as one."""

    chosen: tuple[Segment, ...] = ()
    run: Mapping[str, inductor.Segment] = field(default_factory=dict)
    prices: Mapping[str, Price] = field(default_factory=dict)
    split: str = ""


def no_regions(trace: Trace, machine: Machine, segments: Sequence[Segment], prices: Mapping[str, Price]) -> Regions:
    """Compile none."""
    return Regions()


@dataclass(frozen=True, eq=False)
class RegionCompiler:
    """Compiles the regions of a planned step that are faster than their ops in segments, and fit the budget.

    Attributes:
        nodes: of the graph, by name.
        subgraph: makes the graph of a segment.
    """

    nodes: Mapping[str, fx.Node]
    subgraph: Callable[[Segment], fx.Graph]
    profiler: RegionProfiler

    def __call__(
        self, trace: Trace, machine: Machine, segments: Sequence[Segment], prices: Mapping[str, Price]
    ) -> Regions:
        """Return the regions. One that is over the budget is compiled in two parts."""
        run: dict[str, inductor.Segment] = {}
        found: dict[str, Price] = {}
        chosen, refused = list[Segment](), list[str]()
        todo = [*find_regions(trace, lambda op: _is_compilable(self.nodes[op.name]))]
        while todo:
            region = todo.pop(0)
            compiled = _compiled(self.subgraph(region))
            price = self._price(trace, region, compiled) if isinstance(compiled, inductor.Segment) else compiled
            if isinstance(price, str) or isinstance(compiled, str):
                refused.append(str(price))
            elif not faster_regions(trace, [region], segments, {**prices, region.name: price}):
                refused.append("not faster")
            elif over_budget(trace, machine, [region], {region.name: price}):
                parts = split_region(trace, region, LEAST)
                refused += ["over the budget"] * (not parts)
                todo = [*parts, *todo]
            else:
                chosen.append(region)
                run[region.name], found[region.name] = compiled, price
        split = ", ".join(f"{count} {reason}" for reason, count in Counter(refused).items())
        return Regions(tuple(chosen), run, found, split)

    def _price(self, trace: Trace, region: Segment, run: inductor.Segment) -> Price | str:
        """Return the price of a region, relative to those of its ops, or why it can't be used."""
        reads = [tensors(self.nodes[read])[0] for read in region.reads]
        cost = self.profiler(run, reads, [read in region.frees for read in region.reads])
        if isinstance(cost, str):
            return f"refused ({cost})"
        expected = [layout_in_storage(tensors(self.nodes[value])[0]) for value in region.outputs]
        if [*cost.layouts] != expected:
            return "refused (Inductor lays out a result in another way)"
        alone_us = sum(trace.op[name].us for name in region.ops)
        return Price(alone_us * cost.us / cost.apart_us, cost.workspace)


def _compiled(part: fx.Graph) -> inductor.Segment | str:
    """Return the compiled region, or why it can't be compiled."""
    digest = inductor.digest_of(part)
    if digest not in _refused:
        try:
            return inductor.compile_segment(part)
        except LoweringError as error:
            _refused[digest] = f"refused ({str(error).splitlines()[0]})"
    return _refused[digest]


def _is_compilable(op: fx.Node) -> bool:
    """Return True for an op of torch's that only computes tensors of its own."""
    target = op.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    if (is_random(op) and draws(op)) or float_arguments(op) or not _is_of_tensors(op):
        return False
    return all(map(_is_of_tensors, op.all_input_nodes)) and storages(op).isdisjoint(all_storages(op.all_input_nodes))


def _is_of_tensors(node: fx.Node) -> bool:
    """Return True for a tensor, and for a tuple if only its tensors are read."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return bool(tensors(node)) and all(isinstance(user.meta.get("val"), Tensor) for user in node.users)
    return isinstance(value, Tensor)
