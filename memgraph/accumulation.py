"""Let backward add each gradient to the one that is there as soon as it is made.

g = mm(x, d)                        g = mm(x, d)
...                       ->        w_grad = accumulate(w_grad, g)    # in place; g's bytes go here
return g                            ...
                                    return w_grad
"""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from .capture import Captured
from .nodes import returned
from .ops import accumulate


def accumulating(captured: Captured, watched: Container[str]) -> fx.Graph:
    """A copy of the joint graph that takes the parameters' gradients as inputs, and adds to those not `watched`; and to
    this rank's part of what ranks have summed."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    output = graph.output(graph.graph_copy(captured.graph.graph, copies))
    output.meta = dict(captured.graph.graph.output_node().meta)
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1]
    parameters = {
        role.name: node for role, node in zip(captured.inputs, graph.find_nodes(op="placeholder"), strict=True)
    }
    handed = returned(graph)
    for place, role in enumerate(captured.outputs):
        if role.kind == "shard":
            with graph.inserting_after(last_input):
                last_input = _gradient_input(graph, handed[place])
            with graph.inserting_after(handed[place]):
                handed[place] = _accumulate(graph, last_input, handed[place])
        if role.kind == "gradient":
            with graph.inserting_after(last_input):
                last_input = _gradient_input(graph, parameters[role.name])
            if role.name not in watched:
                with graph.inserting_after(handed[place]):
                    handed[place] = _accumulate(graph, last_input, handed[place])
    output.args = (tuple(handed),)
    return graph


def mark_watched(captured: Captured, watched: Container[str]) -> None:
    """Say of the gradients of these parameters that autograd hands them on, so that they can't go elsewhere."""
    meta = captured.graph.graph.output_node().meta
    meta["kinds"] = tuple(
        "watched" if role.kind == "gradient" and role.name in watched else kind
        for role, kind in zip(captured.outputs, meta["kinds"], strict=True)
    )


def _gradient_input(graph: fx.Graph, parameter: fx.Node) -> fx.Node:
    node = graph.placeholder(f"{parameter.name}_grad")
    node.meta = {
        "kind": "gradient",
        "val": parameter.meta["val"].detach().clone(),
        "where": parameter.meta.get("where", ""),
    }
    return node


def _accumulate(graph: fx.Graph, gradient: fx.Node, new: fx.Node) -> fx.Node:
    node = graph.call_function(accumulate, (gradient, new))
    node.meta = {"phase": "backward", "val": gradient.meta["val"], "where": new.meta.get("where", "")}
    return node
