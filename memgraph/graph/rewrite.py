"""A captured graph and the trace that shall run -> the graph that does.

The applied trace is walked line by line; each line becomes a node: a node of the captured graph, a copy of one, or a
memory op. Which values a node reads is taken from the line by position.  Fake values are derived afresh where storages
change, so that `summarize` of the result finds on the graph, and not in the text, what the text promised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from passes import Op, Trace
from passes.ir.ops import is_runtime, value_of, verb_of

from .nodes import derived_nodes, tensors
from .result_layout import REAL, rerun
from .summarize import FAR


def rewrite(graph: fx.Graph, applied: Trace) -> fx.Graph:
    """The graph that runs the ops of `applied`, a trace that `passes.apply` made of `graph`'s own."""
    return Rewriter(graph).rewrite(applied)


class Rewriter:
    """Makes a graph of a text; each line that computes is found in the graph by its name.

    `env` maps the names of the applied trace to nodes of the new graph; `fresh` are those whose fake values are
    new."""

    def __init__(self, graph: fx.Graph) -> None:
        self.old = {node.name: node for node in graph.nodes}
        self.graph = graph
        self.mode = fake_mode(graph)
        self.new = fx.Graph()
        self.env: dict[str, fx.Node] = {}
        self.fresh: set[fx.Node] = set()
        self.sent: list[Tensor] = []  # by slot
        self.slot: dict[str, int] = {}  # of each op that copies

    def rewrite(self, applied: Trace) -> fx.Graph:
        """The new graph; once."""
        for op in applied.ops:
            if op.name in self.old or op.recomputes:
                self.env[op.name] = self._compute(op)
            elif is_runtime(op.fn):
                self.env[op.name] = self._memory_op(op)
        output = self.new.output(tuple(self.env[value] for _, value in applied.outputs))
        output.meta = self.graph.output_node().meta | {"kinds": tuple(kind for kind, _ in applied.outputs)}
        self.new.lint()
        return self.new

    def _compute(self, op: Op) -> fx.Node:
        """A captured node, or a copy of one, reading what the line reads."""
        source = self.old[op.recomputes or op.name]
        inputs = source.all_input_nodes
        # The states that an update reads, which stand first, are in no graph.
        reads = dict(zip(inputs, op.reads[len(op.reads) - len(inputs) :], strict=True))
        node = self.new.node_copy(source, lambda read: self.env[reads[read]])
        node.meta = {**source.meta, "phase": op.phase, "slice": op.slice}
        if op.recomputes:
            node.meta["again"] = op.recomputes
        if op.offloaded:
            node.meta[FAR] = True
        own = {made.name for made in op.makes}
        moved = not self.fresh.isdisjoint(node.all_input_nodes) and any(held not in own for held in op.holds)
        if op.recomputes and REAL in source.meta:
            node.meta["val"] = rerun(node, self.mode)
            self.fresh.add(node)
        elif op.recomputes or moved:
            node.meta["val"] = derived_nodes(node, self.mode)
            self.fresh.add(node)
        return self._named(node, op)

    def _memory_op(self, op: Op) -> fx.Node:
        verb = verb_of(op.fn)
        reads = tuple(self.env[read] for read in op.reads)
        node = self.new.call_function(getattr(torch.ops.memgraph, verb).default, (*reads, *self._rest(verb, op, reads)))
        node.meta = {"phase": op.phase, "where": op.where}
        node.meta["val"] = derived_nodes(node, self.mode)
        self.fresh.add(node)
        return self._named(node, op)

    def _rest(self, verb: str, op: Op, reads: tuple[fx.Node, ...]) -> tuple[Any, ...]:
        """The arguments of a memory op behind the values that it reads."""
        if verb == "rng_state":
            return (tensors(self.old[value_of(op.name)])[0].device,)
        if verb == "swap_rng":
            return (reads[0].args[-1],)
        if verb in ("narrow", "widen"):
            return ()
        if verb == "offload" or (verb == "reload" and op.reads[0] not in self.slot):
            self.slot[op.name if verb == "offload" else op.reads[0]] = len(self.sent)
            self.sent.append(tensors(reads[0])[0])
        slot = self.slot.setdefault(op.name, self.slot.get(op.reads[0], -1))
        sent = self.sent[slot]
        return (slot, list(sent.shape), list(sent.stride()), sent.dtype, sent.device) if verb == "reload" else (slot,)

    def _named(self, node: fx.Node, op: Op) -> fx.Node:
        node.name = op.name
        return node


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode in which the graph's fake values were made; a new one, if it has none."""
    for node in graph.nodes:
        for tensor in tensors(node):
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    return FakeTensorMode()
