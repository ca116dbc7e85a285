"""The sums of gradients in backward: find them, make them early, make them in place.

g_1 = mm(t_1, x_1)                  g_1 = mm(t_1, x_1)
...                                 ...
g_2 = mm(t_2, x_2)        ->        g_2 = mm(t_2, x_2)
...                                 g = accumulate(g_1, g_2)     # in place; the same bits
g = add(g_1, g_2)                   ...

Pipeline stages that share a parameter return a part of its sum each, and add the parts once a step.

A function of the user's whose backward calls `backward()` adds to `.grad` several times: each term is an arrival.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from .captured import Captured
from .define_op import define_op
from .nodes import all_storages, aten, fake_result, is_sum, returned_values, storages
from .ops import accumulate
from .rewrite import copy_graph, fake_mode

_library = torch.library.Library("memgraph_arrivals", "DEF")
COPIES = (aten.clone.default, aten.permute.default)  # of a sum, in a gradient's layout
ADD_ARRIVAL = define_op(_library, "add(Tensor total, Tensor gradient) -> Tensor", torch.add, torch.add)


def arrivals(result: fx.Node) -> list[fx.Node]:
    """Return the terms that eager would add to `.grad` one after the other, for a gradient or a dense copy of one."""
    total: fx.Node = result
    while total.target in COPIES:
        total = total.all_input_nodes[0]
    terms: list[fx.Node] = []
    while total.target is ADD_ARRIVAL:
        total, term = total.all_input_nodes
        terms.insert(0, term)
    return [total, *terms] if terms else [result]


def gradient_sums(captured: Captured) -> frozenset[str]:
    """Return the names of the sums that make gradients of parameters, if nothing else reads these sums."""
    results = returned_values(captured.graph.graph)
    todo = [results[place] for place, role in enumerate(captured.outputs) if role.kind == "gradient"]
    sums: set[str] = set()
    while todo:
        node = todo.pop()
        if len(node.users) == 1 and is_sum(node) and all(map(_is_gradient, node.all_input_nodes)):
            sums.add(node.name)
            todo += [term for term in node.all_input_nodes if len(term.users) == 1]
    return frozenset(sums)


def _is_gradient(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("phase") == "backward"


def sum_grads_early(graph: fx.Graph) -> None:
    """Move each sum over micro-batches behind its last term.

    It is made in-place if the first term is not read later.
    """
    sums = dict[fx.Node, None]()
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if _adds_microbatch(node, sums):
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
    graph = copy_graph(graph)
    returned = _returned_sums(graph)
    ops = (node for node in graph.nodes if isinstance(node.target, OpOverload))
    kept = all_storages(node for node in ops if node.target.namespace != "aten")
    sums = (node for node in graph.nodes if _adds_in_backward(node) and node not in returned)
    _sum_in_place(graph, {node for node in sums if kept.isdisjoint(storages(node.all_input_nodes[0]))})
    return graph


def _adds_microbatch(node: fx.Node, sums: Container[fx.Node]) -> bool:
    """Return True if a node adds the gradient from one more micro-batch."""
    if not is_sum(node) or node.meta["phase"] != "backward" or node.meta.get("part"):
        return False
    total, new = node.all_input_nodes
    return bool(new.meta.get("part")) and (bool(total.meta.get("part")) or total in sums)


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
    return is_sum(node) and all(each.meta.get("phase") == "backward" for each in (node, node.all_input_nodes[0]))
