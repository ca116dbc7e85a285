"""Find the ops that add up the gradients of a parameter that is used several times.

gw1 = mm(x, a);  gw2 = mm(b, c);  gw = add(gw1, gw2);  return gw     ->     {"gw"}

Pipeline stages that share the parameter return a part each, and add the parts once a step.
"""

from __future__ import annotations

from torch import fx

from .captured import Captured
from .nodes import aten, returned_values


def gradient_sums(captured: Captured) -> frozenset[str]:
    """Return the names of the sums that make gradients of parameters, if nothing else reads these sums."""
    results = returned_values(captured.graph.graph)
    todo = [results[place] for place, role in enumerate(captured.outputs) if role.kind == "gradient"]
    sums: set[str] = set()
    while todo:
        node = todo.pop()
        if _is_sum(node):
            sums.add(node.name)
            todo += [term for term in node.all_input_nodes if len(term.users) == 1]
    return frozenset(sums)


def _is_sum(node: fx.Node) -> bool:
    terms = node.all_input_nodes
    if node.target is not aten.add.Tensor or node.kwargs or len(terms) != 2 or len(node.users) != 1:
        return False
    return all(term.op == "call_function" and term.meta.get("phase") == "backward" for term in terms)
