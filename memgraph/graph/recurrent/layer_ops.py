"""Ops that run a recurrent layer over all of its steps, where torch makes it of many ops.

    y, hy, saved..., ticket = memgraph_recurrent::forward([x, hx, w...], "gru", ...)
    dx, dw...               = memgraph_recurrent::backward([x, hx, w...], "gru", ..., [dy, None], [saved...], ticket)

Forward returns what autograd saves, one flat tensor for each storage. The ticket holds no bytes: it carries autograd's
nodes to backward. Both are the ops that eager runs, in eager's order. A run on zeros says what they return.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ...system.device import CPU
from ...system.trial_room import trial_room
from ..define_op import define_op
from ..result_layout import Layout, empty, layout
from .saved_graph import Layer, SavedGraph

KNOWN = 1024  # layers that are described
COPIES = 12  # of the gates of all steps that a layer makes at most, backward included
Arguments = tuple[str, list[int], bool, bool, bool, list[int]]  # those of `Layer`


def has_layers(graph: fx.Graph) -> bool:
    """Return True if a recurrent layer is one op of the graph."""
    return bool(graph.find_nodes(op="call_function", target=FORWARD))


class Described(NamedTuple):
    """The results of a forward on tensors of these layouts, and the uses of each trained one, by position."""

    results: tuple[Layout, ...]
    saved: tuple[Layout, ...]
    uses: Counter[int]


def described(layer: Layer, tensors: Sequence[Tensor]) -> Described:
    """Return a layer's description for tensors of these layouts, each in a storage that it fills."""
    return _described(layer, tuple(map(layout, tensors)))


def described_gradients(
    layer: Layer, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Layout | None, ...]:
    """Return the layouts of the gradients of the trained tensors, for tangents of these layouts."""
    forms = (None if x is None else layout(x) for x in tangents)
    return _described_gradients(layer, tuple(map(layout, tensors)), tuple(forms))


@lru_cache(maxsize=KNOWN)
def _described(layer: Layer, forms: tuple[Layout, ...]) -> Described:
    with _tried(layer, forms) as (_, graph):
        return Described(tuple(map(layout, graph.results)), tuple(map(layout, graph.saved)), graph.uses)


@lru_cache(maxsize=KNOWN)
def _described_gradients(
    layer: Layer, forms: tuple[Layout, ...], tangents: tuple[Layout | None, ...]
) -> tuple[Layout | None, ...]:
    with _tried(layer, forms) as (tensors, graph):
        given = [None if form is None else empty(form, CPU) for form in tangents]
        return tuple(None if x is None else layout(x) for x in graph.gradients(tensors, graph.saved, given))


@contextmanager
def _tried(layer: Layer, forms: Sequence[Layout]) -> Iterator[tuple[list[Tensor], SavedGraph]]:
    """Run forward on zeros; on fake tensors, which take a hundred times as long, if there is no room for that."""
    steps, gates = forms[0], forms[1 + layer.states]
    directions = 2 if layer.bidirectional else 1
    nbytes = COPIES * math.prod(steps[1][:-1]) * gates[1][0] * directions * steps[0].itemsize
    is_real = nbytes + sum(math.prod(shape) * dtype.itemsize for dtype, shape, _ in forms) <= trial_room()
    mode = nullcontext() if is_real else FakeTensorMode(allow_non_fake_inputs=True)
    with _disable_current_modes(), mode:
        tensors = [empty(form, CPU).zero_() for form in forms]
        yield tensors, SavedGraph(layer, tensors)


def _layer(kind: str, batch_sizes: Sequence[int], *rest: Any) -> Layer:
    has_biases, train, bidirectional, trained = rest
    return Layer(kind, tuple(batch_sizes), has_biases, train, bidirectional, tuple(trained))


def _forward(tensors: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    layer, ticket = _layer(*arguments), tensors[0].new_empty(0)
    if not layer.trained:
        return [*layer.run(tensors), ticket]
    graph = SavedGraph(layer, tensors)
    results, saved, graph.results, graph.saved = graph.results, graph.saved, [], []
    ticket.memgraph_graph = graph  # type: ignore[attr-defined]
    return [*results, *saved, ticket]


def _fake_forward(tensors: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    known = described(_layer(*arguments), tensors)
    return [*(empty(form, tensors[0].device) for form in (*known.results, *known.saved)), tensors[0].new_empty(0)]


def _backward(tensors: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    *_, tangents, saved, ticket = arguments
    graph: SavedGraph = ticket.memgraph_graph
    return [x for x in graph.gradients(tensors, saved, tangents) if x is not None]


def _fake_backward(tensors: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    *of_layer, tangents, _, _ = arguments
    forms = described_gradients(_layer(*of_layer), tensors, tangents)
    return [empty(form, tensors[0].device) for form in forms if form is not None]


_library = torch.library.Library("memgraph_recurrent", "DEF")
_LAYER = "str kind, int[] batch_sizes, bool has_biases, bool train, bool bidirectional, int[] trained"
FORWARD = define_op(_library, f"forward(Tensor[] tensors, {_LAYER}) -> Tensor[]", _forward, _fake_forward)
BACKWARD = define_op(
    _library, f"backward(Tensor[] tensors, {_LAYER}, Tensor?[] tangents, Tensor[] saved, Tensor ticket) -> Tensor[]",
    _backward, _fake_backward,
)  # fmt: skip
