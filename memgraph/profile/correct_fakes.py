"""Correct the fake values of a graph where real ops make something else.

    native_layer_norm under autocast:   fake says bf16[8, 1] for its statistics, the CPU's kernel makes f32[8, 1]

A forecast is made of fake values, so it is as true as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..graph.nodes import fake_result, tensors
from ..graph.result_layout import REAL, ResultLayout, _like, layout_in_storage
from .op_profiler import is_view


def apply_profiled_layouts(
    graph: fx.Graph, mode: FakeTensorMode, made: Callable[[fx.Node], tuple[ResultLayout, ...] | None]
) -> None:
    """Give every op that makes something else than its fake value the value that it makes, and its views after it."""
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_view(node):
            if not changed.isdisjoint(node.all_input_nodes):
                node.meta["val"] = fake_result(node, mode)
                changed.add(node)
            continue
        real, expected = made(node), tuple(map(layout_in_storage, tensors(node)))
        # Where a kernel leaves out a result that was not asked for, the fake one only makes the forecast too high.
        if real is not None and len(real) == len(expected) and real != expected:
            node.meta |= {"val": _like(node, real, mode), REAL: True}
            changed.add(node)
