"""What forward leaves in the attributes of its module: a captured step leaves nothing, so it has to make no difference.

    self.width = x.shape[-1]                            the same every time, and nobody asks: fine
    self.count = getattr(self, "count", 0) + 1          another each time: a CaptureError
    first = not hasattr(self, "done"); self.done = True the second call is another one: a CaptureError

Where forward has left something behind, it is traced once more with that in place.  If it then does the same and leaves
the same, so will every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError
from ..guards.attribute_snapshot import AttributeSnapshot

# A trace: its graph, all else that it returns, and what it has left.
TraceRecord = tuple[fx.GraphModule, object, AttributeSnapshot]


def refuse_side_effects(before: AttributeSnapshot, first: TraceRecord, trace: Callable[[], TraceRecord]) -> None:
    """Raise if the next call would be another one for what the first trace has left behind."""
    name = before.changed(first[2])
    if name is None:
        return
    if first[2].has_fakes(name):
        raise stored_tensor_error(name)
    try:
        second = trace()
    except Exception as error:
        raise _unsettled(name) from error
    other = first[2].changed(second[2])
    if other is not None or first[1] != second[1] or not _is_same(first[0], second[0]):
        raise _unsettled(other or name)


def stored_tensor_error(name: str) -> CaptureError:
    """The error about a tensor that forward leaves on its module."""
    return CaptureError(
        f"forward stores a tensor in {name}, as no captured step can: return it, or register {name} "
        "as a buffer of its shape and dtype before the first step"
    )


def _unsettled(name: str) -> CaptureError:
    return CaptureError(
        f"forward changes {name}, and the next call is another one for it, but a captured step runs no Python: make it "
        "a buffer (register_buffer, a tensor), or change it outside of forward; if the first call alone makes it, run "
        "the plain module once before it is compiled"
    )


def _is_same(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two graphs do the same, whatever their nodes are called."""
    if _ops(one.graph) != _ops(other.graph):
        return False
    pairs = zip(one.graph.find_nodes(op="get_attr"), other.graph.find_nodes(op="get_attr"), strict=True)
    return all(is_same_constant(getattr(one, str(a.target)), getattr(other, str(b.target))) for a, b in pairs)


def _ops(graph: fx.Graph) -> list[object]:
    place = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    read = [map_arg((node.args, node.kwargs), place.__getitem__) for node in graph.nodes]
    targets = ["" if node.op == "get_attr" else node.target for node in graph.nodes]
    return [(node.op, target, repr(args)) for node, target, args in zip(graph.nodes, targets, read, strict=True)]


def is_same_constant(one: Any, other: Any) -> bool:
    """Return True if two constants of graphs are the same, bit by bit."""
    if one is other:
        return True
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or FakeTensor in (type(one), type(other)):
        return False
    with _disable_current_modes():
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
