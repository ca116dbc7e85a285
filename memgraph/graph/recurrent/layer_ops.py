"""Ops that run a recurrent layer over all of its steps, where torch makes it of many ops.

    y, hy, saved..., ticket = memgraph_recurrent::forward([x, hx, w...], "gru", ...)
    dx, dw...               = memgraph_recurrent::backward([x, hx, w...], "gru", ..., [dy, None], [saved...], ticket)

Forward returns what autograd saves, one flat tensor for each storage. The ticket holds no bytes: it carries autograd's
nodes to backward. Both are the ops that eager runs, in eager's order. A run on fake tensors describes their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ...system.device import CPU
from ..define_op import define_op
from ..result_layout import Layout, empty, layout
from .saved_graph import Layer, SavedGraph

KNOWN = 64  # layers of which results are known; each keeps autograd's nodes of one layer
Arguments = tuple[str, list[int], bool, bool, bool, list[int]]  # those of `Layer`


def has_layers(graph: fx.Graph) -> bool:
    """Return True if a recurrent layer is one op of the graph."""
    return bool(graph.find_nodes(op="call_function", target=FORWARD))


class Described:
    """What a layer returns for tensors of these layouts on a CPU."""

    def __init__(self, layer: Layer, forms: Sequence[Layout]) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _disable_current_modes(), self._mode:
            self._tensors = [empty(form, CPU) for form in forms]
            self._graph = SavedGraph(layer, self._tensors)
        self.results = tuple(map(layout, self._graph.results))
        self.saved = tuple(map(layout, self._graph.saved))
        self.uses = self._graph.uses
        self._gradients: dict[tuple[Layout | None, ...], tuple[Layout | None, ...]] = {}

    def gradients(self, tangents: Sequence[Tensor | None]) -> tuple[Layout | None, ...]:
        """Return the layouts of the gradients of the trained tensors, for tangents of these layouts."""
        key = tuple(None if x is None else layout(x) for x in tangents)
        if key not in self._gradients:
            with _disable_current_modes(), self._mode:
                given = [None if form is None else empty(form, CPU) for form in key]
                found = self._graph.gradients(self._tensors, self._graph.saved, given)
            self._gradients[key] = tuple(None if x is None else layout(x) for x in found)
        return self._gradients[key]


def described(layer: Layer, tensors: Sequence[Tensor]) -> Described:
    """Return a layer's description for tensors of these layouts, each in a storage that it fills."""
    return _described(layer, tuple(map(layout, tensors)))


_described = lru_cache(maxsize=KNOWN)(Described)


def _layer(kind: str, batch_sizes: Sequence[int], *rest: Any) -> Layer:
    *flags, trained = rest
    return Layer(kind, tuple(batch_sizes), *flags, tuple(trained))


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
    forms = described(_layer(*of_layer), tensors).gradients(tangents)
    return [empty(form, tensors[0].device) for form in forms if form is not None]


_library = torch.library.Library("memgraph_recurrent", "DEF")
_LAYER = "str kind, int[] batch_sizes, bool has_biases, bool train, bool bidirectional, int[] trained"
FORWARD = define_op(_library, f"forward(Tensor[] tensors, {_LAYER}) -> Tensor[]", _forward, _fake_forward)
BACKWARD = define_op(
    _library, f"backward(Tensor[] tensors, {_LAYER}, Tensor?[] tangents, Tensor[] saved, Tensor ticket) -> Tensor[]",
    _backward, _fake_backward,
)  # fmt: skip
