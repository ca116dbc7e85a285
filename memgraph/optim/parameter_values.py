"""Which values of a step are of one parameter: its bytes, and its gradient.

w = parameter();  dw = mm(x_t, dy);  return gradient dw   ->   {w: ("w", "dw")}
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from ..graph.captured import Captured, Input, Output
from ..graph.nodes import returned_values


def parameter_values(graph: fx.Graph, captured: Captured, named: Mapping[str, Tensor]) -> dict[Tensor, tuple[str, ...]]:
    """The names of the values of each parameter, in a graph of the captured step; `named` are the module's."""
    inputs = zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=False)
    outputs = zip(returned_values(graph), captured.outputs, strict=True)
    roles: list[tuple[fx.Node, Input | Output]] = [*inputs, *outputs]
    found: dict[Tensor, tuple[str, ...]] = {}
    for node, role in roles:
        if role.kind in ("parameter", "gradient") and role.name in named:
            found[named[role.name]] = (*found.get(named[role.name], ()), str(node.name))
    return found
