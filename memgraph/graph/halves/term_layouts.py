"""The layouts that values of backward have where a sum is left with one of its terms.

s = add(tangent, d);  t = view(s)   ->   s = d in its own strides, as autograd has it;  t = view of these
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ...tensors.layout import is_dense


def term_strides(graph: fx.Graph, copies: Collection[fx.Node], ends: Collection[Any]) -> dict[fx.Node, list[int]]:
    """Return the strides of copies of terms; none if an op behind them can't take a value in such strides.

    Args:
        copies: nodes that copy their first argument, in place of a sum.
        ends: targets of nodes that take any strides, and whose results no op reads.
    """
    changed: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        return changed.get(node) if node in changed else _without_bytes(node.meta["val"])

    for node in graph.nodes:
        if node.op == "output" or node.target in ends:
            continue
        if node in copies:
            result = value(node.args[0])
            if not is_dense(result):
                return {}
        elif changed.keys().isdisjoint(node.all_input_nodes):
            continue
        elif not _is_known(node.target):
            return {}
        else:
            args, kwargs = map_arg((node.args, node.kwargs), value)
            try:
                result = node.target(*args, **kwargs)
            except RuntimeError:  # no view of these strides
                return {}
        if _strides(result) != _strides(node.meta["val"]):
            changed[node] = result
    return {node: list(changed[node].stride()) for node in copies if node in changed}


def _is_known(target: Any) -> bool:
    return target is operator.getitem or (isinstance(target, OpOverload) and target.namespace == "aten")


def _without_bytes(thing: Any) -> Any:
    def leaf(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(Tensor, leaf, thing)


def _strides(thing: Any) -> list[tuple[int, ...]]:
    return [leaf.stride() for leaf in pytree.tree_leaves(thing) if isinstance(leaf, Tensor)]
