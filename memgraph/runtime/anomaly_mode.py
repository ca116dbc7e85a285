"""Find the op of backward that makes a NaN, in torch's anomaly mode.

    with torch.autograd.detect_anomaly():
        loss.backward()    ->   RuntimeError: aten.div.Tensor, of blocks.3.mlp model.py:71, returned nan values

The half runs as it does without, with a look at each gradient in it; so values come and go as they do then.  What
forward's ops make is not looked at, nor what a formula masks in the next op: torch sees neither.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from ..graph.nodes import aten
from ..graph.ops import accumulate
from ..profile.step_timer import LINE

MASKS = (aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor)


def finds_nan() -> bool:
    """Whether torch has been asked to look for NaN in backward."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def run_checked(half: fx.GraphModule, values: list[Tensor], tangents: Collection[str]) -> Any:
    """What a backward half makes of `values`; `tangents` are the names of those of its inputs.

    Raises:
        RuntimeError: an op has made a NaN; says which, with its module and its line.
    """
    gradients = _made_of(half.graph, tangents)

    def look(name: str, value: object) -> None:
        if name in gradients and has_nan(value):
            raise RuntimeError(_said(gradients[name]))

    code = half.graph.python_code("self")
    known = {**code.globals, "memgraph_look": look}
    exec(LINE.sub(r"\g<0>;  memgraph_look('\1', \1)", code.src), known)
    return known["forward"](half, values)


def has_nan(value: object) -> bool:
    """Whether a tensor, or one of several, holds a NaN."""
    if isinstance(value, tuple | list):
        return any(map(has_nan, value))
    if not isinstance(value, Tensor) or value.is_meta or not (value.is_floating_point() or value.is_complex()):
        return False
    return bool(value.isnan().any())


def _made_of(graph: fx.Graph, tangents: Collection[str]) -> dict[str, fx.Node]:
    """The nodes by their names whose values are made of tangents, and that others than masks read."""
    reached = {node for node in graph.find_nodes(op="placeholder") if node.target in tangents}
    for node in graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes) and _computes(node):
            reached.add(node)
    looked_at = (node for node in reached if not all(user.target in MASKS for user in node.users))
    return {node.name: node for node in looked_at if node.op == "call_function"}


def _computes(node: fx.Node) -> bool:
    """Whether it is no op that moves bytes, whose result may be yet to come."""
    return node.target is accumulate or not str(node.target).startswith("memgraph.")


def _said(node: fx.Node) -> str:
    where = node.meta.get("where", "")
    return f"{node.target}{f', of {where},' * bool(where)} returned nan values in backward"
