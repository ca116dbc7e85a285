"""Rewrite a captured graph so that it runs a trace in slices.

A line of a part becomes a copy of the captured node, with the sizes of the part. Lines that a slice adds become views,
room for rows, and ops that write into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from passes import Op
from passes.slices import parts
from passes.slices.parts import Origin
from passes.slices.row_rule import type_shape
from passes.slices.unroll import Unrolled

from ..graph.nodes import all_storages, allocates_nothing, aten, fake_result, storages
from ..graph.rewrite import fake_mode
from .linear_reads import VIEWS
from .slice_ops import SCALE

# Arguments that are sizes of the result.
SIZES: dict[Any, int] = dict.fromkeys((*VIEWS, aten.expand.default, aten.new_zeros.default, aten.new_full.default), 1)
SIZES |= {aten.slice_backward.default: 1, aten.zeros.default: 0, aten.full.default: 0}
WIDE = torch.float32  # in which parts of sums in half precision are added up
WRITERS = {
    parts.WRITE: aten.copy_.default,
    parts.ADD: aten.add_.Tensor,
    parts.ADD_PRODUCT: aten.addmm_.default,
    parts.ADD_BATCHED: aten.baddbmm_.default,
}


def sliced_graph(graph: fx.Graph, unrolled: Unrolled) -> fx.Graph:
    """Return the graph that runs the trace of a slice of `graph`'s own trace.

    Raises:
        RuntimeError: torch can't run an op on a part.
    """
    writer = _Writer(graph)
    for op in unrolled.trace.ops:
        writer.add(op, unrolled.origins.get(op.name))
    output = writer.new.output(tuple(writer.env[value] for _, value in unrolled.trace.outputs))
    output.meta = dict(graph.output_node().meta)
    writer.new.lint()
    return writer.new


class _Writer:
    """Builds the new graph.

    Attributes:
        env: maps names of the trace to its nodes.
        fresh: values that were views, and have storages of their own.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.mode = fake_mode(graph)
        self.old = {node.name: node for node in graph.nodes}
        self.new = fx.Graph()
        self.env: dict[str, fx.Node] = {}
        self.fresh: set[fx.Node] = set()

    def add(self, op: Op, origin: Origin | None) -> None:
        """Add the node of a line."""
        node = self._captured(op) if origin is None else self._added(op, origin)
        node.name = op.name
        self.env[op.name] = node

    def _captured(self, op: Op) -> fx.Node:
        source = self.old[op.name]
        node = self.new.node_copy(source, lambda read: self.env[read.name])
        node.meta = dict(source.meta)
        is_view = not storages(source).isdisjoint(all_storages(source.all_input_nodes))
        if is_view and not self.fresh.isdisjoint(node.all_input_nodes):
            node.meta["val"] = fake_result(node, self.mode)
            self.fresh.add(node)
        return node

    def _added(self, op: Op, origin: Origin) -> fx.Node:
        """Return the node of a line that the slice adds."""
        reads = [self.env[read] for read in op.reads]
        if origin.view is not None:
            return self._call(op, aten.slice.Tensor, reads[0], *origin.view)
        source = self.old[origin.source]
        value: Tensor = source.meta["val"]
        where = {"dtype": value.dtype, "device": value.device}
        match origin.kind:
            case "one":
                return self._call(op, aten.ones.default, list(value.shape), **where)
            case "room":
                return self._room(op, source, **where)
            case "write":
                return self._call(op, WRITERS[op.fn], *reads)
            case "widen":
                return self._call(op, aten._to_copy.default, *reads, dtype=WIDE)
            case "narrow":
                return self._shared(self._call(op, aten._to_copy.default, *reads, dtype=value.dtype), value)
            case "whole":
                return self._whole(self._call(op, aten.alias.default, *reads), reads[0])
            case "scale":
                return self._whole(self._call(op, SCALE, *reads), reads[0])
            case "sum":
                return self._shared(self._part(op, source, reads), value)
            case _:
                return self._part(op, source, reads)

    def _room(self, op: Op, source: fx.Node, **where: Any) -> fx.Node:
        """Return a node that makes room for a value; that of a view, which may have gaps, is dense."""
        value: Tensor = source.meta["val"]
        is_view = allocates_nothing(source)
        if is_view:
            with self.mode:
                value = torch.empty_like(value)
        node = self._call(op, aten.empty_strided.default, list(value.shape), list(value.stride()), **where)
        if not is_view:
            return self._shared(node, value)
        self.fresh.add(node)
        return node

    def _whole(self, node: fx.Node, parts: fx.Node) -> fx.Node:
        """Let a node share the fake value of what it is an alias of."""
        self.fresh |= {node} if parts in self.fresh else set()
        return self._shared(node, parts.meta["val"])

    def _part(self, op: Op, source: fx.Node, reads: list[fx.Node]) -> fx.Node:
        """Return a captured node that runs on the rows of a part."""
        env = dict(zip(source.all_input_nodes, reads, strict=True))
        node = self.new.node_copy(source, env.__getitem__)
        node.meta = {**source.meta, "phase": op.phase}
        if source.target in SIZES and type_shape(op.type) != tuple(source.meta["val"].shape):
            place = SIZES[source.target]
            node.args = (*node.args[:place], list(type_shape(op.type)), *node.args[place + 1 :])
        node.meta["val"] = fake_result(node, self.mode)
        return node

    def _shared(self, node: fx.Node, value: Tensor) -> fx.Node:
        """Let a node have the fake value of the captured one, which later views share."""
        node.meta["val"] = value
        return node

    def _call(self, op: Op, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.new.call_function(target, args, kwargs)
        node.meta = {"phase": op.phase, "where": op.where}
        node.meta["val"] = fake_result(node, self.mode)
        return node
