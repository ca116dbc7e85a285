"""Add gradients inside backward, as soon as they are computed.

g = mm(x, d)                        g = mm(x, d)
...                       ->        w_grad = accumulate(w_grad, g)    # in place; g's bytes are free here
return g                            ...
                                    return w_grad

g_1 = mm(t_1, x_1)                  g_1 = mm(t_1, x_1)
...                                 ...
g_2 = mm(t_2, x_2)        ->        g_2 = mm(t_2, x_2)
...                                 g = accumulate(g_1, g_2)     # micro-batches: in place; the same bits
g = add(g_1, g_2)                   ...
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from torch import fx
from torch._ops import OpOverload

from .captured import Captured
from .nodes import all_storages, aten, fake_result, is_lazy, returned_values, storages
from .ops import accumulate
from .rewrite import fake_mode


def accumulate_grads(captured: Captured, hooked: Container[str]) -> fx.Graph:
    """Return a joint graph that takes existing gradients as inputs and adds to them, except for `hooked` parameters.

    Shards of reduced gradients are added to as well.
    """
    graph = _copied(captured.graph.graph)
    output = graph.output_node()
    inputs, results = graph.find_nodes(op="placeholder"), returned_values(graph)
    owners = {role.name: node for role, node in zip(captured.inputs, inputs, strict=True) if role.kind == "parameter"}
    last_input = inputs[-1]
    for place, role in enumerate(captured.outputs):
        if role.kind not in ("gradient", "shard"):
            continue
        with graph.inserting_after(last_input):
            last_input = _gradient_input(graph, owners[role.name] if role.kind == "gradient" else results[place])
        if role.kind == "shard" or role.name not in hooked:
            with graph.inserting_after(results[place]):
                results[place] = _accumulate(graph, last_input, results[place])
    output.args = (tuple(results),)
    return graph


def mark_hooked_grads(captured: Captured, hooked: Container[str]) -> None:
    """Mark the gradients of these parameters, which autograd accumulates, so that they are not offloaded.

    Lazily conjugated or negated gradients are marked as well: to offload them takes a copy.
    """
    output = captured.graph.graph.output_node()
    output.meta["kinds"] = tuple(
        "watched" if role.kind == "gradient" and (role.name in hooked or is_lazy(node)) else kind
        for role, kind, node in zip(
            captured.outputs, output.meta["kinds"], returned_values(captured.graph.graph), strict=True
        )
    )


def _gradient_input(graph: fx.Graph, owner: fx.Node) -> fx.Node:
    """Insert an input for an existing gradient, with the layout of its parameter or shard."""
    node = graph.placeholder(f"{owner.name}_grad")
    node.meta = {"kind": "gradient", "val": owner.meta["val"].detach().clone(), "where": owner.meta.get("where", "")}
    return node


def _accumulate(graph: fx.Graph, gradient: fx.Node, new: fx.Node) -> fx.Node:
    node = graph.call_function(accumulate, (gradient, new))
    node.meta = {"phase": "backward", "val": gradient.meta["val"], "where": new.meta.get("where", "")}
    return node


def sum_grads_early(graph: fx.Graph) -> None:
    """Move each sum over micro-batches behind its last term.

    It is made in-place if the first term is not read later.
    """
    sums = dict[fx.Node, None]()
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if _is_sum(node, sums):
            sums[node] = None
            last = max(node.all_input_nodes)
            if last.next is not node:
                last.append(node)
    _sum_in_place(graph, sums)


def with_sums_in_place(graph: fx.Graph) -> fx.Graph:
    """Return a graph whose backward adds in place where the first term is not read later, as autograd does.

    Micro-batches are left out, since their ops may be moved, and so are gradients that are returned, which may be
    offloaded once they are made, and results of ops that may keep them.
    """
    if any(node.meta.get("part") for node in graph.nodes) or not any(map(_adds_in_backward, graph.nodes)):
        return graph
    graph = _copied(graph)
    returned = _returned_sums(graph)
    ops = (node for node in graph.nodes if isinstance(node.target, OpOverload))
    kept = all_storages(node for node in ops if node.target.namespace != "aten")
    sums = (node for node in graph.nodes if _adds_in_backward(node) and node not in returned)
    _sum_in_place(graph, {node for node in sums if kept.isdisjoint(storages(node.all_input_nodes[0]))})
    return graph


def _copied(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    output = copied.output(copied.graph_copy(graph, {}))
    output.meta = dict(graph.output_node().meta)
    return copied


def _is_sum(node: fx.Node, sums: Container[fx.Node]) -> bool:
    """Return True if a node adds the gradient from one more micro-batch."""
    terms = node.all_input_nodes
    if node.kwargs or node.meta["phase"] != "backward" or node.meta.get("part") or len(terms) != 2:
        return False
    return bool(terms[1].meta.get("part")) and (bool(terms[0].meta.get("part")) or terms[0] in sums)


def _sum_in_place(graph: fx.Graph, sums: Container[fx.Node]) -> None:
    place = {node: i for i, node in enumerate(graph.nodes)}
    holders: dict[int, list[fx.Node]] = {}
    replaced = set[int]()  # storages of sums; views of these are views of the first term now
    for node in graph.nodes:
        if not replaced.isdisjoint(storages(node)):
            node.meta["val"] = fake_result(node, fake_mode(graph))
        if node in sums:
            before = storages(node)
            _sum_if_last(node, holders, place)
            replaced |= before - storages(node)
        for storage in storages(node):
            holders.setdefault(storage, []).append(node)


def _sum_if_last(node: fx.Node, holders: Mapping[int, Sequence[fx.Node]], place: Mapping[fx.Node, int]) -> None:
    first = node.all_input_nodes[0]
    term, total = first.meta["val"], node.meta["val"]
    alike = (term.shape, term.stride(), term.dtype) == (total.shape, total.stride(), total.dtype)
    fills = term.untyped_storage().nbytes() == total.untyped_storage().nbytes()
    same_storage = [holder for storage in storages(first) for holder in holders[storage]]
    is_own = all(holder.op == "call_function" for holder in same_storage)
    is_apart = storages(first).isdisjoint(storages(node.all_input_nodes[1]))
    if (
        alike
        and fills
        and is_own
        and is_apart
        and all(place[user] <= place[node] for holder in same_storage for user in holder.users)
    ):
        node.target, node.meta["val"] = accumulate, term


def _returned_sums(graph: fx.Graph) -> set[fx.Node]:
    """Return the sums that are only returned, or added to such sums."""
    returned = set[fx.Node]()
    for node in reversed(graph.nodes):
        if _adds_in_backward(node) and all(user.op == "output" or user in returned for user in node.users):
            returned.add(node)
    return returned


def _adds_in_backward(node: fx.Node) -> bool:
    terms = node.all_input_nodes
    adds = node.target is aten.add.Tensor and len(terms) == len(node.args) == 2 and not node.kwargs
    return adds and all(each.meta.get("phase") == "backward" for each in (node, terms[0]))
