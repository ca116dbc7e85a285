"""Write a graph so that weights are read in blocks of rows, each an input of its own.

w = parameter()                             w__rows_1 = parameter()            # the first 384 rows
y = addmm(b, x, t(w))                       y__room = empty(...)
--- backward ---                            y__room[:, :384] = addmm(b[:384], x, t(w__rows_1))      ...
dx = mm(dy, w)                      ->      --- backward ---
dw = mm(t(dy), x)                           dx__sum = mm(dy[:, :384], w__rows_1);  dx__sum += dy[:, 384:768] w__rows_2
return gradient dw                          dw__rows_1 = mm(t(dy)[:384], x)                         ...
                                            return gradient dw__rows_1, gradient dw__rows_2, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.slices.row_blocks import Rows

from ..graph.captured import Captured
from ..graph.nodes import aten, fake_result, named_placeholder
from ..graph.rewrite import fake_mode
from .slice_ops import INDICES_WITHIN, LOOK_UP
from .weights import LOOKUP, LOOKUP_GRADIENT, Weight

Blocks = Mapping[Weight, tuple[Rows, ...]]


def in_row_blocks(
    captured: Captured, blocks: Mapping[str, tuple[Rows, ...]], weights: Mapping[str, Weight]
) -> Captured:
    """Return a step whose graph reads these parameters in blocks; its inputs and outputs stay those of the call."""
    graph = write_blocks(captured.graph.graph, {weights[name]: rows for name, rows in blocks.items()})
    module = fx.GraphModule(captured.graph, graph)
    return replace(captured, graph=module, blocks=dict(blocks), whole=captured.unsliced)


def write_blocks(graph: fx.Graph, blocks: Blocks) -> fx.Graph:
    """Return a graph that reads weights of `graph` in blocks, and makes their gradients in blocks."""
    writer = _Writer(graph, blocks)
    for node in graph.nodes:
        writer.add(node)
    writer.new.lint()
    return writer.new


class _Writer:
    """Builds the new graph.

    Attributes:
        env: maps nodes of the old graph to those of the new one.
        parts: maps weights and their gradients to their blocks.
        waiting: sums that make gradients, and their terms: these are made where the last sum is, for no micro-batch.
    """

    def __init__(self, graph: fx.Graph, blocks: Blocks) -> None:
        self.mode, self.new, self.count = fake_mode(graph), fx.Graph(), 0
        self.env: dict[fx.Node, fx.Node] = {}
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.weights = {weight.node: rows for weight, rows in blocks.items()}
        self.views = {view: weight.node for weight in blocks for view in weight.views}
        self.reads = {read: weight.node for weight in blocks for read in weight.reads}
        self.gradients = {weight.gradient: rows for weight, rows in blocks.items() if weight.gradient is not None}
        self.sums = {node for weight in blocks for node in weight.sums}
        self.waiting = self.sums | {node for weight in blocks for node in weight.terms if weight.sums}

    def add(self, node: fx.Node) -> None:
        """Add what stands for a node of the old graph."""
        if node in self.weights:
            self.parts[node] = [self._input(node, k, rows) for k, rows in enumerate(self.weights[node], 1)]
        elif node in self.reads:
            self.env[node] = self._read(node, self.reads[node])
        elif node in self.gradients:
            self.parts[node] = [self._gradient(node, k, rows) for k, rows in enumerate(self.gradients[node], 1)]
        elif node.op == "output":
            self._output(node)
        elif node not in self.views and node not in self.waiting:
            self.env[node] = self.new.node_copy(node, self.env.__getitem__)
            self.env[node].name, self.env[node].meta = node.name, dict(node.meta)

    def _input(self, weight: fx.Node, k: int, rows: Rows) -> fx.Node:
        whole: Tensor = weight.meta["val"]
        node = named_placeholder(self.new, f"{weight.name}__rows_{k}")
        with self.mode:
            value = torch.empty(rows[1] - rows[0], whole.shape[1], dtype=whole.dtype, device=whole.device)
        node.meta = {**weight.meta, "val": value}
        return node

    def _read(self, node: fx.Node, weight: fx.Node) -> fx.Node:
        blocks = list(zip(self.parts[weight], self.weights[weight], strict=True))
        if node.target is LOOKUP:
            total = self._room(node)
            for part, rows in blocks:
                self._call(node, LOOK_UP, total, part, self.env[node.args[1]], rows[0], weight.meta["val"].shape[0])  # type: ignore[index]
        elif node.args[-1] is weight:
            total = self._sum(node, blocks)
        else:
            total = self._room(node)
            for part, rows in blocks:
                self._write_columns(node, total, part, rows)
        return self._shared(self._call(node, aten.alias.default, total), node, node.name)

    def _write_columns(self, node: fx.Node, room: fx.Node, part: fx.Node, rows: Rows) -> None:
        *bias, x = (self.env[argument] for argument in node.args[:-1])  # type: ignore[index]
        bias = [self._slice(node, each, -1, rows) for each in bias]
        columns = self._call(node, node.target, *bias, x, self._call(node, aten.t.default, part))
        self._call(node, aten.copy_.default, self._slice(node, room, 1, rows), columns)

    def _sum(self, node: fx.Node, blocks: list[tuple[fx.Node, Rows]]) -> fx.Node:
        *bias, x = (self.env[argument] for argument in node.args[:-1])  # type: ignore[index]
        (first, rows), *rest = blocks
        total = self._call(node, node.target, *bias, self._slice(node, x, 1, rows), first)
        self._shared(total, node, f"{node.name}__sum")
        for part, rows in rest:
            self._call(node, aten.addmm_.default, total, self._slice(node, x, 1, rows), part)
        return total

    def _gradient(self, node: fx.Node, k: int, rows: Rows) -> fx.Node:
        """Add the ops that make a block of a gradient, each sum behind its terms, before the next block."""
        if node in self.sums:
            part = self._call(node, node.target, *(self._gradient(term, k, rows) for term in node.args))  # type: ignore[arg-type]
        else:
            part = self._term(node, rows)
        part.name = f"{node.name}__rows_{k}"
        return part

    def _term(self, node: fx.Node, rows: Rows) -> fx.Node:
        if node.target is LOOKUP_GRADIENT:
            dy, indices, _, padding, _ = node.args
            count = rows[1] - rows[0]
            here = self._call(node, INDICES_WITHIN, self.env[indices], rows[0], count, padding)  # type: ignore[index]
            return self._call(node, node.target, self.env[dy], here, count, -1, False)  # type: ignore[index]
        left, right = (self.env[argument] for argument in node.args)  # type: ignore[index]
        return self._call(node, node.target, self._slice(node, left, 0, rows), right)

    def _output(self, node: fx.Node) -> None:
        returned: list[fx.Node] = node.args[0]  # type: ignore[assignment]
        values = [self.parts.get(value) or [self.env[value]] for value in returned]
        output = self.new.output(tuple(value for each in values for value in each))
        kinds = node.meta["kinds"]
        repeated = [kind for kind, each in zip(kinds, values, strict=True) for _ in each]
        output.meta = {**node.meta, "kinds": tuple(repeated)}

    def _room(self, node: fx.Node) -> fx.Node:
        value: Tensor = node.meta["val"]
        layout = list(value.shape), list(value.stride())
        room = self._call(node, aten.empty_strided.default, *layout, dtype=value.dtype, device=value.device)
        return self._shared(room, node, f"{node.name}__room")

    def _slice(self, node: fx.Node, value: fx.Node, dim: int, rows: Rows) -> fx.Node:
        return self._call(node, aten.slice.Tensor, value, dim, *rows)

    def _shared(self, new: fx.Node, node: fx.Node, name: str) -> fx.Node:
        """Let a new node have the fake value of the captured one, which later views share."""
        new.meta["val"], new.name = node.meta["val"], name
        return new

    def _call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        self.count += 1  # names of torch's own might be those of ops to come
        new = self.new.create_node("call_function", target, args, kwargs, f"{node.name}__part_{self.count}")
        kept = ("phase", "where", "part") if node not in self.waiting else ("phase", "where")
        new.meta = {name: fact for name, fact in node.meta.items() if name in kept}
        new.meta["val"] = fake_result(new, self.mode)
        return new
