"""A planned graph -> the same graph with stretches of it compiled.

    %add : add(%x, %r)                              %add_segment : segment(%x, %r, %w, %b)
    %n   : native_layer_norm(%add, %w, %b)    ->    %add : getitem(%add_segment, 0)
    %n_0 : getitem(%n, 0)                           %n_0 : getitem(%add_segment, 1)

What is a segment, and what the step is with it, is the text's affair: see `passes/segments.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from passes import Choice, Machine, Op, Trace
from passes.choice import dearer
from passes.segments import Price, Segment, affordable, fused, segments, shared

from . import inductor
from .float_inputs import marks
from .nodes import all_storages, storages, tensors
from .probe import Prober, layout
from .rewrite import Rewriter
from .times import Times
from .truth import empty_like

# Not tagged pointwise, and fused by Inductor all the same.
FUSED = frozenset({
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "sum", "mean", "var", "var_mean",
    "amax", "amin", "_to_copy", "clone", "where", "full_like", "zeros_like", "ones_like", "cat", "expand",
})  # fmt: skip


class Lowering:
    """The segments of one step's text, compiled and priced; those that can't be compiled are an error if all `must` be,
    and are left out otherwise."""

    def __init__(self, graph: fx.Graph, trace: Trace, prober: Prober, must: bool = True) -> None:
        self.graph = graph
        self.nodes = {node.name: node for node in graph.nodes}
        found = segments(trace, lambda op: _is_fusible(self.nodes[op.name]))
        self.trace = self._alone(trace, found, prober)
        self.run = inductor.all_compiled({each.name: self._part(each) for each in found}, must)
        self.refused = len(found) - len(self.run)
        priced = {each.name: self._price(each, prober) for each in found if each.name in self.run}
        self.prices = {name: price for name, price in priced.items() if price is not None}
        self.segments = tuple(each for each in found if each.name in self.prices)
        self.chosen: tuple[Segment, ...] = ()

    def shared(self) -> Trace:
        """The text at the prices that ops have in segments."""
        return shared(self.trace, self.segments, self.prices)

    def lowered(self, machine: Machine) -> tuple[fx.Graph, Trace]:
        """The graph and its text, with all segments that are faster than their ops and within the budget."""
        self.chosen = affordable(self.trace, machine, self.segments, self.prices)
        text = fused(self.trace, self.chosen, self.prices)
        return _WithSegments(self.graph, self.run, self.chosen).rewrite(text), text

    def stated(self, choice: Choice, machine: Machine) -> Choice:
        """The choice at prices that fit the step as it is lowered: what is in no segment takes what it does by itself,
        however cheap it was thought to be in one."""
        inside = {name for segment in self.chosen for name in segment.ops}
        return dearer(choice, machine, {op.name: op.us for op in self.trace.ops if op.name not in inside})

    def apart(self, times: Times) -> Times:
        """What each op took in a step in which segments ran: its part of what its segment took."""
        found = dict(times.ops)
        for segment in self.chosen:
            alone = sum(self.trace.op[name].us for name in segment.ops) or 1.0
            took = times.ops.get(segment.name, 0.0)
            found |= {name: self.trace.op[name].us / alone * took for name in segment.ops}
        return replace(times, ops=found)

    def _alone(self, trace: Trace, found: Iterable[Segment], prober: Prober) -> Trace:
        """The text with what the ops of segments take by themselves.

        A plan was made at the prices that they have in segments, beside which no segment is faster than its ops.  So
        were ops that stand in none here, where the plan has cut them off.
        """
        us = {name: prober(self.nodes[name]).us for segment in found for name in segment.ops}
        others = [op for op in trace.ops if op.name not in us and op.phase != "update"]
        fusible = [op for op in others if op.name in self.nodes and _is_fusible(self.nodes[op.name])]
        us |= {op.name: max(op.us, prober(self.nodes[op.name]).us) for op in fusible}
        return replace(trace, ops=tuple(replace(op, us=us.get(op.name, op.us)) for op in trace.ops))

    def _begun(self, segment: Segment) -> tuple[fx.Graph, dict[str, fx.Node]]:
        """A graph with nothing in it but what a segment reads, by name."""
        graph = fx.Graph()
        given = {read: graph.placeholder(read) for read in segment.reads}
        for read, node in given.items():
            node.meta = {"val": self.nodes[read].meta["val"]}
        return graph, given

    def _part(self, segment: Segment) -> fx.Graph:
        """A segment's own graph."""
        part, given = self._begun(segment)
        env = {self.nodes[read]: node for read, node in given.items()}
        for name in segment.ops:
            source = self.nodes[name]
            if all(read in env for read in source.all_input_nodes):
                env[source] = part.node_copy(source, env.__getitem__)
        part.output(tuple(env[self.nodes[value]] for value in segment.gives))
        part.eliminate_dead_code()
        return part

    def _price(self, segment: Segment, prober: Prober) -> Price | None:
        """What it takes; None if it can't be run here, or makes what the graph does not foretell."""
        graph, given = self._begun(segment)
        node = graph.create_node("call_function", self.run[segment.name], tuple(given.values()), name=segment.name)
        expected = [tensors(self.nodes[value])[0] for value in segment.gives]
        node.meta = {"val": tuple(expected)}
        made = prober.made(node)
        if made is None or [(one.layout, one.offset) for one in made] != [(layout(value), 0) for value in expected]:
            return None
        cost = prober(node)
        return Price(cost.us, cost.workspace)


class _WithSegments(Rewriter):
    """The graph of a text in which some lines are segments."""

    def __init__(self, graph: fx.Graph, run: Mapping[str, inductor.Segment], chosen: Iterable[Segment]) -> None:
        super().__init__(graph)
        self.run = run
        self.given = {each.name: each for each in chosen}

    def _compute(self, op: Op) -> fx.Node:
        if not op.reads or op.reads[0] not in self.given:
            return super()._compute(op)
        whole, place = self.env[op.reads[0]], self.given[op.reads[0]].gives.index(op.name)
        return self._fresh(op, operator.getitem, (whole, place), whole.meta["val"][place])

    def _memory_op(self, op: Op) -> fx.Node:
        sources = [tensors(self.old[value])[0] for value in self.given[op.name].gives]
        value = tuple(empty_like(source, self.mode) for source in sources)
        return self._fresh(op, self.run[op.name], tuple(self.env[read] for read in op.reads), value)

    def _fresh(self, op: Op, target: Callable[..., object], args: tuple[Any, ...], value: object) -> fx.Node:
        node = self.new.create_node("call_function", target, args)
        node.meta = {"phase": op.phase, "slice": op.slice, "part": op.part, "where": op.where, "val": value}
        self.fresh.add(node)
        return self._named(node, op)


def _is_fusible(node: fx.Node) -> bool:
    """Whether it computes element by element or along rows, from tensors to tensors of its own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    name = target._schema.name.removeprefix("aten::")
    if (torch.Tag.pointwise not in target.tags and name not in FUSED) or marks(node):
        return False
    given = [source.meta.get("val") for source in node.all_input_nodes]
    if not all(isinstance(value, Tensor) for value in given) or not tensors(node):
        return False
    return storages(node).isdisjoint(all_storages(node.all_input_nodes))
