"""Find the op of backward that makes a NaN, in torch's anomaly mode.

    with torch.autograd.detect_anomaly():
        loss.backward()    ->   RuntimeError: aten.div.Tensor, of blocks.3.mlp model.py:71, returned nan values

The half runs as usual, and each gradient in it is checked.  Results of forward's ops are not checked, nor gradients
that the next op masks: torch sees neither.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from ..graph.halves.edited_code import run_edited
from ..graph.nodes import aten
from ..graph.ops import accumulate

MASKS = (aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor)


def finds_nan() -> bool:
    """Return True if torch is asked to look for NaN in backward."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def run_checked(half: fx.GraphModule, values: list[Tensor], tangents: Collection[str]) -> Any:
    """Run a backward half on `values`; `tangents` names the gradients among its inputs.

    Raises:
        RuntimeError: an op made a NaN; names it, with its module and line.
    """
    gradients = _gradients(half.graph, tangents)

    def check(name: str, value: object) -> None:
        if name in gradients and has_nan(value):
            raise RuntimeError(_message(gradients[name]))

    checked = run_edited(half, lambda name, line: f"{line};  memgraph_check('{name}', {name})", memgraph_check=check)
    return checked(half, values)


def has_nan(value: object) -> bool:
    """Return True if a tensor, or one of several, contains a NaN."""
    if isinstance(value, tuple | list):
        return any(map(has_nan, value))
    if not isinstance(value, Tensor) or value.is_meta or not (value.is_floating_point() or value.is_complex()):
        return False
    return bool(value.isnan().any())


def _gradients(graph: fx.Graph, tangents: Collection[str]) -> dict[str, fx.Node]:
    """Return the nodes computed from tangents that other ops than masks read, by name."""
    reached = {node for node in graph.find_nodes(op="placeholder") if node.target in tangents}
    for node in graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes) and _computes(node):
            reached.add(node)
    checked = (node for node in reached if not all(user.target in MASKS for user in node.users))
    return {node.name: node for node in checked if node.op == "call_function"}


def _computes(node: fx.Node) -> bool:
    """Return True unless the op copies bytes, whose result may not have arrived yet."""
    return node.target is accumulate or not str(node.target).startswith("memgraph.")


def _message(node: fx.Node) -> str:
    where = node.meta.get("where", "")
    return f"{node.target}{f', of {where},' * bool(where)} returned nan values in backward"
