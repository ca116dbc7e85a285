"""Drop slices that take the whole dimension, as eager does.

    s = slice(x, 1, 0, max)                        mul(x, y)
    mul(s, y)                               ->     ...
    g = slice_backward(d, [8, n], 1, 0, max, 1)    d, where g was

Python's `x[:, 0:]` makes no op if that is all of `x`; where the size is a symbol, torch does not look.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._subclasses import FakeTensorMode

from ...graph.nodes import allocates_nothing, aten, fake_result, has_same_strides
from ...tensors.traced_size import SizeArgument, always_equal


def drop_whole_slices(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Let users of a whole slice, and of its gradient, read what was sliced."""
    views = {node for node in graph.nodes if node.op == "call_function" and allocates_nothing(node)}
    moved = set[fx.Node]()
    for node in list(graph.nodes):
        if node in moved or (node in views and not moved.isdisjoint(node.all_input_nodes)):
            node.meta["val"] = fake_result(node, mode)
            moved.add(node)
        if node.target not in (aten.slice.Tensor, aten.slice_backward.default):
            continue
        source, begin = node.args[0], 2 if node.target is aten.slice.Tensor else 3
        bounds: list[Any] = [*node.args[begin:]]
        start, end, step = bounds + [0, None, 1][len(bounds) :]
        is_whole = has_same_strides(node.meta["val"], source.meta["val"])
        if start == 0 and step == 1 and is_whole and _is_open(end, node, begin):
            moved |= node.users.keys() & views if node not in views else set()
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_open(end: object, node: fx.Node, begin: int) -> bool:
    """Return True if a slice ends where the dimension does, whatever its length."""
    length = node.meta["val"].shape[node.args[begin - 1]]
    if isinstance(end, SizeArgument):
        return always_equal([end.size], [length])
    return end is None or end > 1 << 62  # type: ignore[operator]
