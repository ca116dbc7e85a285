"""Check whether forward can run a second time although it changes buffers.

    y = linear(x) - mean; mean.lerp_(y.mean(0), 0.1)    ->   no: y depends on the buffer's old value
    y = batch_norm(x)  # in training                    ->   yes: y depends on x alone; the buffer is only updated

A second forward starts from the buffers that the first one has left. For outputs that depend on the old values, it
would need a copy, which takes memory in every step for a second forward that is rare.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import fx
from torch._ops import OpOverload

from ..graph.captured import Input
from ..graph.nodes import STATISTICS, aten, changed_storages, is_guard, returned_values, storages

if TYPE_CHECKING:
    from ..graph.captured import Captured

NORMALIZED = 3  # results of a batch norm before its new statistics
OVERWRITING = (aten.copy.default, aten.copy_.default)  # of their first argument, they only read the layout


def can_run_again(captured: Captured) -> bool:
    """Return True if a second forward would find the same values, and have the same differentiable outputs."""
    if captured.opaque:  # they may change more than buffers
        return False
    graph = captured.graph.graph
    written = overwritten_buffers(captured)
    if not written:
        return True
    if captured.has_custom_functions or any(role.kind != "buffer" for role in written.values()):
        return False
    outputs, reached = returned_values(graph), _reachable(written, graph)
    asked = {read for node in graph.nodes if is_guard(node) for read in node.all_input_nodes}
    return asked.isdisjoint(reached) and not any(outputs[place] in reached for place in captured.differentiable)


def overwritten_buffers(captured: Captured) -> dict[fx.Node, Input]:
    """Return the placeholders that forward changes, with their roles."""
    graph = captured.graph.graph
    changed = changed_storages(graph)
    inputs = zip(graph.find_nodes(op="placeholder"), captured.graph_inputs, strict=True)
    return {node: role for node, role in inputs if not changed.isdisjoint(storages(node))}


def _reachable(sources: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values depend on the old values of these, and these."""
    reached, statistics = set(sources), set[fx.Node]()
    for node in graph.nodes:
        read = set(node.all_input_nodes)
        if node.target in OVERWRITING:
            read = {node.args[1]}
        elif node.target is operator.getitem and node.args[0] in statistics and node.args[1] >= NORMALIZED:
            reached.add(node)
        elif given := _statistics(node):
            if not reached.isdisjoint(given.values()):
                statistics.add(node)
            read -= set(given.values())
        if not reached.isdisjoint(read):
            reached.add(node)
    return reached


def _statistics(node: fx.Node) -> Mapping[str, fx.Node]:
    """Return the running statistics that a batch norm takes in training, by argument."""
    if not isinstance(node.target, OpOverload):
        return {}
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if not (given.get("training") or "with_update" in node.target._schema.name):
        return {}
    return {name: read for name in STATISTICS if isinstance(read := given.get(name), fx.Node)}
