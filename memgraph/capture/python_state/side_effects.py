"""Refuse forwards that change what their next call reads, and go on doing so.

    self.width = x.shape[-1]                            never read: allowed
    self.last = y.detach()                              never read: a further result of the step
    self.count = self.count + 1                         counted, and never read otherwise: allowed
    if self.table is None: self.table = make()          two calls differ, and then no more: allowed
    self.mean = 0.9 * self.mean + y.mean()              reads and writes tensors of one layout: allowed
    self.count = getattr(self, "count", 0) + 1          differs in every call: a CaptureError
    COUNTS["calls"] += 1                                a variable elsewhere that differs in every call: the same

A captured step runs no Python: its writes to attributes follow each run. If the next call reads any, it is traced as
well, with these in place. It has to leave the like of what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ...graph.provenance import PROVENANCE
from ...guards.attribute_snapshot import AttributeSnapshot, stored_tensor_error
from ...guards.attribute_writes import AttributeWrite, AttributeWrites, require_plain_values, with_shared
from ...guards.variable_scope import OuterVariable
from ...guards.written_attributes import Attribute, HeldNeeded, written_attributes
from ...tensors.pytree import flatten, tensors_of
from ...tensors.traced_number import ValueNeededError
from .function_caches import empty_function_caches

# An attribute, by its path or by what is written, or a variable elsewhere.
Changed = str | AttributeWrite | OuterVariable


@dataclass(frozen=True, eq=False)
class TraceRecord:
    """A trace: its graph, its other results, the attributes and variables after it, and its writes.

    Attributes:
        read: attributes that it read before it wrote them, of those that were tried.
        fill: returns what the trace had where the writes have a reference.
        values: its inputs.
    """

    graph: fx.GraphModule
    facts: object
    after: AttributeSnapshot
    writes: AttributeWrites
    read: Set[Attribute]
    fill: Callable[[Any], Any]
    values: Sequence[Tensor]


def require_held(before: AttributeSnapshot, writes: AttributeWrites, read: Set[Attribute]) -> None:
    """
    Raises:
        HeldNeeded: tensors of attributes that calls write were `read`, and are no arguments of this one.
        CaptureError: they are where they can't be taken out.
    """
    before.restore_attributes()
    written = written_attributes(before.module)
    held = [item.attribute for item in writes.items if item.is_held and _tensors_in(item)]
    if written.note(with_shared(before, [*(read & written.unread), *held]), ()):
        raise HeldNeeded


def _tensors_in(write: AttributeWrite) -> bool:
    """Return True if the attribute has tensors now."""
    try:
        return bool(tensors_of(flatten(write.attribute.value)[0]))
    except CaptureError as error:
        raise stored_tensor_error(write.where) from error


def settled_writes(
    before: AttributeSnapshot, first: TraceRecord, trace: Callable[[Sequence[AttributeWrite]], TraceRecord] | None,
    is_general: bool = False,
) -> AttributeWrites:  # fmt: skip
    """Return the writes of a trace; from now on it is known which of them no call reads.

    Args:
        trace: traces the next call, in which the tensors that were written are arguments; None for a call with
            symbols, which is known to leave the like of what it finds.
        is_general: the call stands for others, with other floats or lengths.

    Raises:
        CaptureError: the next call changes attributes again that it reads, or variables.
        SizeNeededError: there may be a symbol in what is written.
        ValueNeededError: a variable is written outside of the module, maybe from what differs in other calls.
    """
    if is_general and (outer := _changed_outside(before, first)) is not None:
        raise ValueNeededError(f"forward sets {outer.title}")
    writes = _settled(before, first, trace)
    _refuse_other_values(before)
    if trace is None:
        require_plain_values(writes)
    before.restore_attributes()
    written_attributes(before.module).note(with_shared(before, writes.held), writes.unread)
    return writes


def _refuse_other_values(before: AttributeSnapshot) -> None:
    """Raise if forward sets variables that another kind of call has set: no later call of that kind would."""
    known = _set_outside.setdefault(before.module, set())
    for place, title in before.outer.written():
        if place in known:
            raise CaptureError(
                f"forward sets {title}, and it had another value before, in several kinds of calls; no captured step "
                "sets variables outside of its module: set an attribute of the module, or set it outside of forward"
            )
        known.add(place)


# Mutable state of the module: places outside of attributes that captures of each module have set.
_set_outside: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()


def _settled(
    before: AttributeSnapshot, first: TraceRecord, trace: Callable[[Sequence[AttributeWrite]], TraceRecord] | None
) -> AttributeWrites:
    outer = _changed_outside(before, first)
    if outer is not None and first.after.outer.holds(outer, FakeTensor):
        raise CaptureError(
            f"forward stores a tensor in {_labelled(outer, before)}, as no captured step can outside of its module: "
            "return it; a module whose forward does so has to be a submodule, or the loss= itself"
        )
    writes, changed = first.writes, before.changed(first.after)
    if changed is None and outer is None:
        return writes
    before.restore_attributes()
    writes.apply(first.fill)
    found = AttributeSnapshot(before.module, first.values)
    # Those are of another trace, or stand-ins stood for them.
    others = before.paths(written_attributes(before.module).held)
    others |= {item.where for item in writes.items if item.has_numbers}
    if lost := [name for name in found.changes(first.after) if name not in others]:
        raise changed_call_error(lost[0], before)
    written = {item.where for item in writes.items}
    # In a thing that no write can be done to, as an object with slots; the trace has done it.
    rest = [name for name in before.changes(first.after) if name not in written]
    changing = writes.changing
    if trace is None or (not changing and outer is None and not rest):
        return writes
    empty_function_caches(before)
    before.restore_attributes()
    # The next call may take what this one did not; a tensor that is no argument would be a constant of it.
    AttributeWrites(tuple(item for item in writes.items if item.is_read or not item.holds_tensors)).apply(first.fill)
    culprit: Changed = changing[0] if changing else outer or rest[0]
    try:
        second = trace(changing)
    except Exception as error:
        raise changed_call_error(culprit, before) from error
    unread = {item.attribute for item in changing} - second.read
    writes = writes.without_reads(unread)
    if not (changing := writes.changing) and outer is None and not rest:
        return writes
    if again := {(item.where, item.key): item for item in second.writes.without_reads(unread).changing}:
        raise changed_call_error(
            next((item for item in changing if (item.where, item.key) in again), next(iter(again.values()))), before
        )
    later: Changed | None = next((name for name in first.after.changes(second.after) if name in rest), None)
    if outer is not None and later is None:
        later = next(iter(first.after.outer.changes(second.after.outer)), None)
    repeats = is_same_step(first, second) and second.writes.described <= first.writes.described
    # Parts of a batch are called in another order than in eager.
    in_parts = any(node.meta.get(PROVENANCE, {}).get("part") for node in first.graph.graph.nodes)
    if later is not None or (not repeats and (outer is not None or rest or in_parts)):
        raise changed_call_error(later or outer or culprit, before)
    return replace(writes, repeats=repeats)


def _changed_outside(before: AttributeSnapshot, first: TraceRecord) -> OuterVariable | None:
    """Return a variable outside of the module that forward has changed."""
    changed = before.outer.changes(first.after.outer)
    return next((one for one in changed if not before.outer.ran.is_of_hooks(one)), None)


def is_same_step(first: TraceRecord, second: TraceRecord) -> bool:
    """Return True if two traces gave the same graph and the same results."""
    return first.facts == second.facts and is_same_graph(first.graph, second.graph)


def changed_call_error(changed: Changed, before: AttributeSnapshot) -> CaptureError:
    return CaptureError(
        f"forward changes {_labelled(changed, before)}, which changes its next call, but a captured step runs no "
        "Python: make it a buffer (register_buffer, a tensor), or change it outside of forward; a list may be filled "
        "if each call empties it first; if only the first call sets it, run the plain module once before it is "
        "compiled"
    ).about(_attribute(changed, before))


def _labelled(changed: Changed, before: AttributeSnapshot) -> str:
    if isinstance(changed, AttributeWrite):
        return changed.change
    if isinstance(changed, str):
        return changed
    line = before.outer.ran.line(changed)
    return f"{changed.title} (at {line})" if line else changed.title


def _attribute(changed: Changed, before: AttributeSnapshot) -> str:
    """Return the path of an attribute; for a variable, that of the forward of a submodule that refers to it."""
    if isinstance(changed, AttributeWrite):
        return changed.where
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
