"""Whether forward can be run a second time, although it changes buffers.

    y = linear(x) - mean; mean.lerp_(y.mean(0), 0.1)    ->   no: y is made of what the buffer held before
    y = batch_norm(x)  # while it trains                ->   yes: y is made of x alone, and the buffer is only kept up

A second forward starts from the buffers as the first one has left them.  Where an output is made of what they held
before, a copy of that would be needed, which takes memory in every step for the sake of one that may never come.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import fx
from torch._ops import OpOverload

from ..graph.captured import Input
from ..graph.nodes import STATISTICS, aten, changed_storages, returned_values, storages

if TYPE_CHECKING:
    from ..graph.captured import Captured

NORMALIZED = 3  # results of a batch norm before its new statistics: the values, and what backward needs
OVERWRITING = (aten.copy.default, aten.copy_.default)  # their first argument gives its place, not its numbers


def can_run_again(captured: Captured) -> bool:
    """Whether a forward that starts from what this one leaves has the same differentiable outputs."""
    graph = captured.graph.graph
    written = overwritten_buffers(captured)
    if not written:
        return True
    if captured.has_custom_functions or any(role.kind != "buffer" for role in written.values()):
        return False
    made, reached = returned_values(graph), _made_of(written, graph)
    return not any(made[place] in reached for place in captured.differentiable)


def overwritten_buffers(captured: Captured) -> dict[fx.Node, Input]:
    """The placeholders of what forward changes, and what they stand for."""
    graph = captured.graph.graph
    changed = changed_storages(graph)
    inputs = zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    return {node: role for node, role in inputs if not changed.isdisjoint(storages(node))}


def _made_of(sources: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values depend on what these hold at the start, with them."""
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
    """The running statistics that a batch norm takes while it trains, by the names of its arguments."""
    if not isinstance(node.target, OpOverload):
        return {}
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if not (given.get("training") or "with_update" in node.target._schema.name):
        return {}
    return {name: read for name in STATISTICS if isinstance(read := given.get(name), fx.Node)}
