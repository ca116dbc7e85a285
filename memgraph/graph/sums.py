"""The gradient of a parameter is summed over micro-batches as soon as it is made, and where its first term lies.

g_1 = mm(t_1, x_1)                      g_1 = mm(t_1, x_1)
...                                     ...
g_2 = mm(t_2, x_2)             ->       g_2 = mm(t_2, x_2)
...                                     g = accumulate(g_1, g_2)     # in place; the same bits
g = add(g_1, g_2)                       ...
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from torch import fx

from .nodes import aten, storages
from .ops import accumulate


def sum_grads_early(graph: fx.Graph) -> None:
    """Let each sum over micro-batches stand behind its last term, and in place if nobody else needs the first."""
    sums = dict[fx.Node, None]()
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if _is_sum(node, sums):
            sums[node] = None
            last = max(node.all_input_nodes)
            if last.next is not node:
                last.append(node)
    place = {node: i for i, node in enumerate(graph.nodes)}
    holders: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in sums:
            _sum_in_place(node, holders, place)
        for storage in storages(node):
            holders.setdefault(storage, []).append(node)


def _is_sum(node: fx.Node, sums: Container[fx.Node]) -> bool:
    """Whether it adds what one more micro-batch says of a parameter."""
    terms = node.all_input_nodes
    if node.kwargs or node.meta["phase"] != "backward" or node.meta.get("part") or len(terms) != 2:
        return False
    return bool(terms[1].meta.get("part")) and (bool(terms[0].meta.get("part")) or terms[0] in sums)


def _sum_in_place(node: fx.Node, holders: Mapping[int, Sequence[fx.Node]], place: Mapping[fx.Node, int]) -> None:
    first = node.all_input_nodes[0]
    term, total = first.meta["val"], node.meta["val"]
    alike = (term.shape, term.stride(), term.dtype) == (total.shape, total.stride(), total.dtype)
    fills = term.untyped_storage().nbytes() == total.untyped_storage().nbytes()
    held = [holder for storage in storages(first) for holder in holders[storage]]
    made = all(holder.op == "call_function" for holder in held)
    if alike and fills and made and all(place[user] <= place[node] for holder in held for user in holder.users):
        node.target, node.meta["val"] = accumulate, term
