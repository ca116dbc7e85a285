"""Put ops in the place of submodules' calls while a step is traced.

    y = layer(x)    ->   y, ticket = memgraph_opaque::forward([w, x], 1)
                         dw, dx = memgraph_opaque::backward([w, x], [dy], ticket, 1)

The i-th call of the trace is the i-th recorded one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..graph.opaque_ops import BACKWARD, FORWARD
from ..guards.attribute_snapshot import AttributeSnapshot
from ..guards.what_ran import WhatRan
from ..system.entered_code import unwatched
from ..tensors.loss_outputs import reachable_nodes
from .inputs import Inputs, described, inputs_of
from .module_calls import taken_calls
from .part import OpaquePart
from .recorder import NotOpaqueError, Recorded, Recorder


class TracedParts:
    """The parts of one trace."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._left = list(recorder.calls)
        self._before: dict[nn.Module, AttributeSnapshot] = {}

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Trace ops for the recorded calls in this block."""
        self._before = {call.part.module: AttributeSnapshot(call.part.module) for call in self._left}
        with taken_calls(self.recorder.reasons, self._call), _refusing_reads(self._left):
            yield

    def refuse_outer_reads(self, ran: WhatRan) -> None:
        """Refuse that what ran outside of all parts refers to a variable elsewhere that a part changes."""
        for part, variable in ((call.part, one) for call in self.recorder.calls for one in call.part.outer):
            if ran.has(variable):
                reason = f"forward changes {variable.title}, which is read outside of it as well"
                raise NotOpaqueError(part.path, part.module, reason)

    def own(self, paths: Iterable[str]) -> bool:
        """Return True if one of these submodules is a part, or inside of one."""
        parts = tuple(f"{call.part.path}." for call in self.recorder.calls)
        return any(f"{path}.".startswith(parts) for path in paths)

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs, tensors = inputs_of(module, args, kwargs)
        recorded = self._left.pop(0) if self._left else None
        if recorded is None or recorded.part.module is not module or not _is_same(inputs, recorded.part.inputs):
            path, _ = self.recorder.reasons[module]
            raise NotOpaqueError(path, module, "the whole calls it in another way when it is traced")
        part = recorded.part
        if changed := self._before[module].changes(AttributeSnapshot(module)):
            reason = f"forward sets its attribute {changed[0]} before it runs, and a captured step runs no Python"
            raise NotOpaqueError(part.path, module, reason)
        values = _OpaqueCall.apply(self.recorder, recorded, *tensors)  # type: ignore[no-untyped-call]
        outputs = len(part.expected.layouts)
        with torch.no_grad():
            for place, value in zip(part.inputs.written, values[outputs:], strict=True):
                tensors[place].copy_(value)
        return part.expected.filled(values[:outputs], tensors)


@contextmanager
def _refusing_reads(calls: Sequence[Recorded]) -> Iterator[None]:
    """Refuse that anything but a part itself reads an attribute which the part changes."""
    changed = {(id(owner), name): call.part for call in calls for owner, name in call.part.changed_attributes}
    kinds = {type(owner) for call in calls for owner, _ in call.part.changed_attributes}
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, "__getattribute__", _reader(kind.__getattribute__, changed)))
        yield


def _reader(plain: Any, changed: Mapping[tuple[int, str], OpaquePart]) -> Any:
    def read(module: nn.Module, name: str) -> Any:
        if (part := changed.get((id(module), name))) is not None:
            reason = f"forward changes its attribute {name}, which is read outside of it as well"
            raise NotOpaqueError(part.path, part.module, reason)
        return plain(module, name)

    return read


def _is_same(inputs: Inputs, recorded: Inputs) -> bool:
    leaves = described(inputs.leaves) == described(recorded.leaves)
    return leaves and replace(inputs, leaves=()) == replace(recorded, leaves=(), written=())


class _OpaqueCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Recorder, recorded: Recorded, *tensors: Tensor) -> tuple[Tensor, ...]:
        part = recorded.part
        *values, ticket = FORWARD(list(tensors), recorded.number)
        if part.inputs.trained:
            old = [x.clone() if place in part.inputs.written else x for place, x in enumerate(tensors)]
            ctx.save_for_backward(*old, ticket)
        ctx.recorder, ctx.recorded = recorder, recorded
        ctx.set_materialize_grads(False)
        reached = [*part.expected.reached, *(() for _ in part.inputs.written)]
        ctx.mark_non_differentiable(*(x for x, places in zip(values, reached, strict=True) if not places))
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        *tensors, ticket = ctx.saved_tensors
        part = ctx.recorded.part
        tangents = given[: len(part.expected.layouts)]
        with unwatched():  # the part is no code of the trace
            backward = ctx.recorder.measure_backward(ctx.recorded, tangents)
        gradients: list[Tensor | None] = [None] * len(tensors)
        for place, gradient in zip(
            backward.places, BACKWARD(tensors, list(tangents), ticket, ctx.recorded.number), strict=True
        ):
            gradients[place] = gradient
        return None, None, *gradients


def find_sums(roots: Sequence[Tensor]) -> None:
    """Find the inputs of parts that get another gradient before the part's own, in the backward of `roots`.

    Raises:
        NotOpaqueError: such an input is used more than once in a part, so its sum would be in another order.
    """
    nodes = reachable_nodes([root.grad_fn for root in roots])
    uses = Counter(edge for node in nodes for edge in node.next_functions)
    for node in nodes:
        if isinstance(recorded := getattr(node, "recorded", None), Recorded):
            for place, edge in enumerate(node.next_functions):
                if edge[0] is not None and uses[edge] > 1:
                    _refuse_shared_cast(recorded.part, place)
    for node, place in earlier_gradients(roots):
        if not isinstance(recorded := getattr(node, "recorded", None), Recorded):
            continue
        part = recorded.part
        part.single.add(place)
        if part.expected.counts.get(place, 0) > 1:
            raise NotOpaqueError(
                part.path, part.module,
                f"it uses {part.inputs.label(place)} more than once, which is used again after it: their gradients "
                "would be added up in another order than in eager",
            )  # fmt: skip


def earlier_gradients(roots: Sequence[Tensor]) -> Iterator[tuple[Node, int]]:
    """Yield functions and inputs of theirs that get another gradient before theirs, in the backward of `roots`."""
    nodes = reachable_nodes([root.grad_fn for root in roots])
    first = {(root.grad_fn, root.output_nr): 1 << 62 for root in roots}
    for node in nodes:
        for edge in node.next_functions:
            first[edge] = max(first.get(edge, -1), node._sequence_nr())
    for node in nodes:
        for place, edge in enumerate(node.next_functions):
            if edge[0] is not None and first[edge] > node._sequence_nr():
                yield node, place


def _refuse_shared_cast(part: OpaquePart, place: int) -> None:
    if place in part.inputs.parameters and part.modes.casts_are_cached:
        reason = f"autocast casts {part.inputs.label(place)} once for it and for what else uses it"
        raise NotOpaqueError(part.path, part.module, reason)
