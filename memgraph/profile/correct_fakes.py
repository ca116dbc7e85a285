"""Correct the fake values of a graph where real ops return another layout.

    native_layer_norm under autocast:   the fake statistics are bf16[8, 1], the CPU kernel returns f32[8, 1]

A forecast is computed from fake values, so they have to be right.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..graph.nodes import fake_result, tensors
from ..graph.result_layout import REAL, ResultLayout, layout_in_storage, value_like
from .op_profiler import is_view


def apply_profiled_layouts(
    graph: fx.Graph, mode: FakeTensorMode, layouts: Callable[[fx.Node], tuple[ResultLayout, ...] | None]
) -> None:
    """Replace the fake values that differ from the op's real result, and those of its views."""
    ops = [node for node in graph.nodes if node.op == "call_function"]
    views = set(filter(is_view, ops))  # by now, as a replaced value has another storage than its views
    changed: set[fx.Node] = set()
    for node in ops:
        if node in views:
            if not changed.isdisjoint(node.all_input_nodes):
                node.meta["val"] = fake_result(node, mode)
                changed.add(node)
            continue
        real, expected = layouts(node), tuple(map(layout_in_storage, tensors(node)))
        # A kernel may omit a result that nothing reads; its fake value only makes the forecast too high.
        if real is not None and len(real) == len(expected) and real != expected:
            node.meta |= {"val": value_like(node, real, mode), REAL: True}
            changed.add(node)
