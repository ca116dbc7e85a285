"""Trace a recurrent layer as one op, where torch makes it of many.

    gru(x, hx, weights, ..., num_layers=2)   ->   y = memgraph_recurrent::forward([x, hx[:1], w...], "gru", ...) twice

Each step of a cell is dozens of ops. An op for a layer costs a trace, a price and a plan as little as any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...graph.recurrent.layer_ops import BACKWARD, FORWARD, KNOWN, described, described_gradients
from ...graph.recurrent.saved_graph import Layer
from ...graph.result_layout import Layout, empty, layout
from ...opaque.traced_parts import earlier_gradients
from ...system.device import CPU

MANY = 100  # ops of forward from which on a layer is one op
_are_whole = ContextVar("_are_whole", default=False)


class UnrollNeeded(Exception):
    """A layer has to be traced op by op, for its gradients to be added up in eager's order."""


@contextmanager
def whole_layers(are_whole: bool) -> Iterator[None]:
    """Trace layers in the block as one op each, if they are whole."""
    reset = _are_whole.set(are_whole)
    try:
        yield
    finally:
        _are_whole.reset(reset)


def run_layers(
    kind: str, x: Tensor, batch_sizes: Sequence[int], hx: Any, weights: Sequence[Tensor], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool = False,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Run recurrent layers, each as one op, and return what torch's own function does; None if it makes few ops."""
    if dropout and train:
        return None  # whole layers draw what is dropped in another order than eager
    states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    each, directions = len(weights) // layers, 2 if bidirectional else 1
    layer = Layer(kind, tuple(batch_sizes), has_biases, train, bidirectional)
    x = x.transpose(0, 1) if batch_first else x
    first = [x, *(state[:directions] for state in states), *weights[:each]]
    if not _can_be_whole([x, *states, *weights]) or not _is_many(layer, tuple(map(layout, first))):
        return None
    parts = [state.split(directions) if layers > 1 else (state,) for state in states]
    ends: list[tuple[Tensor, ...]] = []
    for i in range(layers):
        tensors = [x, *(part[i] for part in parts), *weights[i * each : (i + 1) * each]]
        trained = [place for place, y in enumerate(tensors) if y.requires_grad and torch.is_grad_enabled()]
        x, *end = _LayerCall.apply(layer._replace(trained=tuple(trained)), *tensors)[: 1 + len(states)]  # type: ignore[no-untyped-call]
        ends.append(tuple(end))
        if dropout and train and i < layers - 1:
            x = torch.dropout(x, dropout, True)
    last = (torch.cat(state) if layers > 1 else state[0] for state in zip(*ends, strict=True))
    return x.transpose(0, 1) if batch_first else x, *last


def refuse_other_sums(roots: Sequence[Tensor]) -> None:
    """
    Raises:
        UnrollNeeded: an input of a layer that is one op gets another gradient before those of the layer.
    """
    for node, place in earlier_gradients(roots):
        if isinstance(uses := getattr(node, "uses", None), Counter) and uses[place] > 1:
            raise UnrollNeeded


def _can_be_whole(tensors: Sequence[Tensor]) -> bool:
    """Return True if all is known of a layer that its description needs, and each tensor is given once."""
    is_known = all(isinstance(size, int) for x in tensors for size in (*x.shape, *x.stride()))
    on_cpu = all(isinstance(x, FakeTensor) and x.device.type == "cpu" for x in tensors)
    is_once = len({id(x) for x in tensors}) == len(tensors)
    return _are_whole.get() and is_known and on_cpu and is_once and not torch.is_autocast_enabled("cpu")


@lru_cache(maxsize=KNOWN)
def _is_many(layer: Layer, forms: Sequence[Layout]) -> bool:
    count = _Count()
    try:
        with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
            tensors = [empty(form, CPU) for form in forms]
            with torch.no_grad(), count:
                layer.run(tensors)
    except _TooManyOps:
        return True
    return False


class _TooManyOps(Exception):
    pass


class _Count(TorchDispatchMode):
    """Stops a run after many ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten"
        if self.count > MANY:
            raise _TooManyOps
        return func(*args, **(kwargs or {}))


class _LayerCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, *tensors: Tensor) -> tuple[Tensor, ...]:
        values: list[Tensor] = FORWARD(list(tensors), *layer)
        results = values[: 1 + layer.states]
        if layer.trained:
            ctx.layer, ctx.uses = layer, described(layer, tensors).uses
            ctx.save_for_backward(*tensors, *values[len(results) :])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*values[len(results) :])
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        layer, count = ctx.layer, len(ctx.needs_input_grad) - 1
        tensors, (*saved, ticket) = list(ctx.saved_tensors[:count]), ctx.saved_tensors[count:]
        tangents = list(given[: 1 + layer.states])
        gradients: list[Tensor | None] = [None] * count
        found = iter(BACKWARD(tensors, *layer, tangents, saved, ticket))
        for place, form in zip(layer.trained, described_gradients(layer, tensors, tangents), strict=True):
            gradients[place] = next(found) if form is not None else None
        return None, *gradients
