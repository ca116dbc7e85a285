"""Refuse forwards whose next call depends on attributes that this one has set.

    self.width = x.shape[-1]                            the same in every call, and never read: allowed
    self.count = self.count + 1                         counted, and never read otherwise: allowed
    self.count = getattr(self, "count", 0) + 1          differs in every call: a CaptureError
    first = not hasattr(self, "done"); self.done = True the second call differs: a CaptureError
    COUNTS["calls"] += 1                                a variable elsewhere that differs in every call: the same

A captured step runs no Python, so it sets no attributes. If forward sets any, it is traced a second time with them in
place. If that gives the same graph and the same attributes, every call does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ...guards.attribute_snapshot import AttributeSnapshot, stored_tensor_error
from ...guards.variable_scope import OuterVariable
from .function_caches import empty_function_caches

TraceRecord = tuple[fx.GraphModule, object, AttributeSnapshot]  # graph, other results, attributes after forward


def refuse_side_effects(
    before: AttributeSnapshot, first: TraceRecord, trace: Callable[[], TraceRecord] | None
) -> None:  # fmt: skip
    """Raise if attributes that the first trace set change the next call, which `trace` traces; None if it is known not
    to differ."""
    changed = _first_change(before, first[2])
    if changed is None:
        return
    if isinstance(changed, str) and first[2].has_fakes(changed):
        raise stored_tensor_error(changed)
    if isinstance(changed, OuterVariable) and first[2].outer.holds(changed, FakeTensor):
        raise stored_tensor_error(_labelled(changed, before))
    if trace is None:
        return
    empty_function_caches(before)
    try:
        second = trace()
    except Exception as error:
        raise _changed_call_error(changed, before) from error
    later = _first_change(first[2], second[2])
    if later is not None or not is_same_step(first, second):
        raise _changed_call_error(later or changed, before)


def _first_change(before: AttributeSnapshot, after: AttributeSnapshot) -> str | OuterVariable | None:
    """Return the first attribute that differs, or else the first variable elsewhere; hooks may change others."""
    outer = (one for one in before.outer.changes(after.outer) if not before.outer.ran.is_of_hooks(one))
    return before.changed(after) or next(outer, None)


def is_same_step(first: TraceRecord, second: TraceRecord) -> bool:
    """Return True if two traces gave the same graph and the same results."""
    return first[1] == second[1] and is_same_graph(first[0], second[0])


def _changed_call_error(changed: str | OuterVariable, before: AttributeSnapshot) -> CaptureError:
    return CaptureError(
        f"forward changes {_labelled(changed, before)}, which changes its next call, but a captured step runs no "
        "Python: make it a buffer (register_buffer, a tensor), or change it outside of forward; if only the first call "
        "sets it, run the plain module once before it is compiled"
    ).about(_attribute(changed, before))


def _labelled(changed: str | OuterVariable, before: AttributeSnapshot) -> str:
    if isinstance(changed, str):
        return changed
    line = before.outer.ran.line(changed)
    return f"{changed.title} (at {line})" if line else changed.title


def _attribute(changed: str | OuterVariable, before: AttributeSnapshot) -> str:
    """Return the path of an attribute; for a variable, that of the forward of a submodule that refers to it."""
    if isinstance(changed, str):
        return changed
    readers = before.outer.ran.paths_of_readers(changed)
    return f"{readers[0]}.forward" if readers and "" not in readers else ""


def is_same_graph(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    """Compare ops and constants; names of nodes may differ."""
    if described_ops(first.graph) != described_ops(second.graph):
        return False
    pairs = zip(first.graph.find_nodes(op="get_attr"), second.graph.find_nodes(op="get_attr"), strict=True)
    return all(is_same_constant(getattr(first, str(a.target)), getattr(second, str(b.target))) for a, b in pairs)


def described_ops(graph: fx.Graph, replaced: Callable[[Any], Any] = lambda arguments: arguments) -> list[object]:
    """Return ops and arguments, with numbers in the place of nodes; `replaced` replaces among the arguments."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    ops: list[object] = []
    for node in graph.nodes:
        arguments = replaced(map_arg((node.args, dict(node.kwargs)), number.__getitem__))
        ops.append((node.op, "" if node.op == "get_attr" else node.target, repr(arguments)))
    return ops


def is_same_constant(first: Any, second: Any) -> bool:
    """Return True if two constants of graphs are the same, bit by bit."""
    if first is second:
        return True
    tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    if not tensors or FakeTensor in (type(first), type(second)):
        return False
    with _disable_current_modes():
        return first.dtype == second.dtype and first.stride() == second.stride() and torch.equal(first, second)
