"""Correct the fake values of a graph where real ops return another layout.

    native_layer_norm under autocast:   the fake statistics are bf16[8, 1], the CPU kernel returns f32[8, 1]

A forecast is computed from fake values, so they have to be right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import CaptureError
from ..graph.nodes import fake_result, tensors
from ..graph.result_layout import REAL, ResultLayout, layout_in_storage, value_like
from ..graph.rewrite import fake_mode
from .op_profiler import is_view


def apply_profiled_layouts(graph: fx.Graph, layouts: Callable[[fx.Node], tuple[ResultLayout, ...] | None]) -> None:
    """Replace the fake values that differ from the op's real result, and those of its views.

    Raises:
        CaptureError: a view is not possible in a real result.
    """
    mode = fake_mode(graph)
    ops = [node for node in graph.nodes if node.op == "call_function"]
    views = set(filter(is_view, ops))  # by now, as a replaced value has another storage than its views
    changed: set[fx.Node] = set()
    for node in ops:
        if node in views:
            if not changed.isdisjoint(node.all_input_nodes):
                node.meta["val"] = _viewed(node, mode)
                changed.add(node)
            continue
        real, expected = layouts(node), tuple(map(layout_in_storage, tensors(node)))
        # A kernel may omit a result that nothing reads; its fake value only makes the forecast too high.
        if real is not None and len(real) == len(expected) and real != expected:
            node.meta |= {"val": value_like(node, real, mode), REAL: True}
            changed.add(node)


def _viewed(node: fx.Node, mode: FakeTensorMode) -> Any:
    try:
        return fake_result(node, mode)
    except (RuntimeError, ValueError) as error:
        source = node.all_input_nodes[0]
        raise CaptureError(
            f"{node.target} can't view {source}, whose kernel ({source.target}) gives it other strides than torch "
            f"describes: {error}; a larger budget leaves room to run the kernel before the step is traced"
        ) from error
