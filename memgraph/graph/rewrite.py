"""Rewrite a captured graph so that it runs a planned trace.

Each line of the trace becomes a node: a captured node, a copy of one, or a memory op. A line says by position which
values it reads. Fake values are recomputed where storages change, so `summarize` of the result tests the trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from passes import Op, Trace
from passes.ir.ops import is_runtime, value_of, verb_of

from .nodes import fake_result, tensors
from .result_layout import REAL, clone_fake_value
from .summarize import OFFLOADED, TIER


def rewrite(graph: fx.Graph, applied: Trace) -> fx.Graph:
    """Return the graph that runs the ops of `applied`, a trace that `passes.apply` made of `graph`'s own."""
    return Rewriter(graph).rewrite(applied)


class Rewriter:
    """Builds the new graph. `env` maps names of the trace to its nodes; `fresh` are nodes with new fake values."""

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
        """Return the new graph; call it once."""
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
        """Copy a captured node, with the inputs that the line reads."""
        source = self.old[op.recomputes or op.name]
        inputs = source.all_input_nodes
        # An update reads optimizer states first, which are not in the graph.
        reads = dict(zip(inputs, op.reads[len(op.reads) - len(inputs) :], strict=True))
        node = self.new.node_copy(source, lambda read: self.env[reads[read]])
        node.meta = {**source.meta, "phase": op.phase, "section": op.section}
        if op.recomputes:
            node.meta["again"] = op.recomputes
        if op.offloaded:
            node.meta |= {OFFLOADED: True, TIER: op.tier}
        own = {storage.name for storage in op.makes}
        moved = not self.fresh.isdisjoint(node.all_input_nodes) and any(storage not in own for storage in op.holds)
        if op.recomputes and REAL in source.meta:
            node.meta["val"] = clone_fake_value(node, self.mode)
            self.fresh.add(node)
        elif (op.recomputes or moved) and tensors(source):
            node.meta["val"] = fake_result(node, self.mode)
            self.fresh.add(node)
        return self._named(node, op)

    def _memory_op(self, op: Op) -> fx.Node:
        verb = verb_of(op.fn)
        reads = tuple(self.env[read] for read in op.reads)
        node = self.new.call_function(getattr(torch.ops.memgraph, verb).default, (*reads, *self._rest(verb, op, reads)))
        node.meta = {"phase": op.phase, "where": op.where, TIER: op.tier}
        node.meta["val"] = fake_result(node, self.mode)
        self.fresh.add(node)
        return self._named(node, op)

    def _rest(self, verb: str, op: Op, reads: tuple[fx.Node, ...]) -> tuple[Any, ...]:
        """Return the arguments of a memory op after the values that it reads."""
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
    """Return the mode in which the graph's fake values were made, or a new one."""
    for node in graph.nodes:
        for tensor in tensors(node):
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    return FakeTensorMode()


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph, whose nodes keep their names and facts."""
    copied = fx.Graph()
    output = copied.output(copied.graph_copy(graph, {}))
    output.meta = dict(graph.output_node().meta)
    return copied
