"""Add gradients inside backward, as soon as they are computed.

g = mm(x, d)                        g = mm(x, d)
...                       ->        w_grad = accumulate(w_grad, g)    # in place; g's bytes are free here
return g                            ...
                                    return w_grad
"""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from ..errors import CaptureError
from .captured import Captured
from .gradient_sums import ADD_ARRIVAL, COPIES, arrivals
from .nodes import is_lazy, returned_values
from .ops import accumulate
from .rewrite import copy_graph


def accumulate_grads(captured: Captured, hooked: Container[str]) -> fx.Graph:
    """Return a joint graph that takes existing gradients as inputs and adds to them, except for `hooked` parameters.

    Shards of reduced gradients are added to as well.
    """
    graph = copy_graph(captured.graph.graph)
    output = graph.output_node()
    inputs, results = graph.find_nodes(op="placeholder"), returned_values(graph)
    roles = zip(captured.graph_inputs, inputs, strict=True)
    owners = {(role.name, role.rows): node for role, node in roles if role.kind == "parameter"}
    last_input, sums = inputs[-1], list[fx.Node]()
    for place, role in enumerate(captured.graph_outputs):
        if role.kind not in ("gradient", "shard"):
            continue
        with graph.inserting_after(last_input):
            owner = owners[role.name, role.rows] if role.kind == "gradient" else results[place]
            last_input = _gradient_input(graph, owner)
        if role.kind == "shard" or role.name not in hooked:
            total = last_input
            for term in arrivals(results[place]):
                with graph.inserting_after(max(term, total)):
                    total = _accumulate(graph, total, term)
            sums.append(results[place])
            results[place] = total
    output.args = (tuple(results),)
    for unread in sums:
        _drop_sum(unread)
    return graph


def mark_hooked_grads(captured: Captured, hooked: Container[str]) -> None:
    """Mark the gradients of these parameters, which autograd accumulates, so that they are not offloaded.

    Lazily conjugated or negated gradients are marked as well: to offload them takes a copy.

    Raises:
        CaptureError: eager would call a hook several times for one gradient.
    """
    for role, node in zip(captured.outputs, returned_values(captured.graph.graph), strict=True):
        if role.kind == "gradient" and role.name in hooked and len(arrivals(node)) > 1:
            raise CaptureError(
                f"the parameter {role.name} has a hook, and its gradient arrives in {len(arrivals(node))} parts, since "
                "a torch.autograd.Function calls backward() in its backward: eager calls the hook for each part, and a "
                "captured step for their sum. Remove the hook, or use torch.utils.checkpoint in place of the Function"
            )
    output = captured.graph.graph.output_node()
    output.meta["kinds"] = tuple(
        "watched" if role.kind == "gradient" and (role.name in hooked or is_lazy(node)) else kind
        for role, kind, node in zip(
            captured.outputs, output.meta["kinds"], returned_values(captured.graph.graph), strict=True
        )
    )


def _drop_sum(total: fx.Node) -> None:
    """Drop a sum of several arrivals that nothing reads any more; an update reads it, for one."""
    while not total.users and total.target in (*COPIES, ADD_ARRIVAL):
        source = total.all_input_nodes[0]
        total.graph.erase_node(total)
        total = source


def _gradient_input(graph: fx.Graph, owner: fx.Node) -> fx.Node:
    """Insert an input for an existing gradient, with the layout of its parameter or shard."""
    node = graph.placeholder(f"{owner.name}_grad")
    node.meta = {"kind": "gradient", "val": owner.meta["val"].detach().clone(), "where": owner.meta.get("where", "")}
    return node


def _accumulate(graph: fx.Graph, gradient: fx.Node, new: fx.Node) -> fx.Node:
    node = graph.call_function(accumulate, (gradient, new))
    node.meta = {"phase": "backward", "val": gradient.meta["val"], "where": new.meta.get("where", "")}
    return node
