"""The autograd graph of a recurrent layer's forward, apart from the tensors that it saves.

    graph = SavedGraph(layer, [x, hx, w, b])   ->   graph.results, graph.saved: one flat tensor for each storage
    graph.gradients([x, hx, w, b], saved, [dy])  ->   [dx, dw, db]

So these tensors are values like others. They can be freed, offloaded, and recomputed by another forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from ...tensors.loss_outputs import reachable_nodes
from .autograd_modes import autograd_keys, saved_tensor_hooks

PLAIN = {kind: getattr(torch._VF, kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")}  # a trace replaces them


class Layer(NamedTuple):
    """One recurrent layer in one or both directions. Without batch sizes, all rows have the same length.

    `trained` are the positions of the tensors that require a gradient, among its input, its states and its weights.
    """

    kind: str
    batch_sizes: tuple[int, ...]
    has_biases: bool
    train: bool
    bidirectional: bool
    trained: tuple[int, ...] = ()

    @property
    def states(self) -> int:
        return 2 if self.kind == "lstm" else 1

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run torch's own function."""
        x, first, *rest = tensors
        hx = (first, rest.pop(0)) if self.states == 2 else first
        with _disable_current_modes():  # torch reads their memory
            sizes: list[Any] = [torch.tensor(self.batch_sizes)] if self.batch_sizes else []
        is_batch_first = [] if sizes else [False]
        results: tuple[Tensor, ...] = PLAIN[self.kind](
            x, *sizes, hx, rest, self.has_biases, 1, 0.0, self.train, self.bidirectional, *is_batch_first
        )
        return results


class SavedGraph:
    """The graph of one forward."""

    def __init__(self, layer: Layer, tensors: Sequence[Tensor]) -> None:
        self.layer, self._store = layer, _Store(tensors)
        leaves = [x.detach().requires_grad_(place in layer.trained) for place, x in enumerate(tensors)]
        with (
            autograd_keys(), torch._C._DisableAutocast(), saved_tensor_hooks(are_off=False),
            saved_tensors_hooks(self._store.pack, self._store.unpack),
        ):  # fmt: skip
            results = layer.run(leaves)
            self._roots = [get_gradient_edge(result) for result in results if layer.trained]
            self._leaves = [get_gradient_edge(leaves[place]) for place in layer.trained]
        self.saved, self._store.own = self._store.own, []
        taken = {x.untyped_storage()._cdata for x in (*tensors, *self.saved)}
        self.results = [_apart(result.detach(), taken) for result in results]
        for leaf in leaves:  # the graph holds them, and must not hold their bytes
            leaf.data = leaf.detach().new_empty(0)

    @property
    def uses(self) -> Counter[int]:
        """The number of uses of each trained tensor in forward, by position."""
        nodes = reachable_nodes([edge.node for edge in self._roots])
        edges = Counter(node for each in nodes for node, _ in each.next_functions)
        return Counter({place: edges[edge.node] for place, edge in zip(self.layer.trained, self._leaves, strict=True)})

    def gradients(
        self, tensors: Sequence[Tensor], saved: Sequence[Tensor], tangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of the trained tensors."""
        roots = [(edge, x) for edge, x in zip(self._roots, tangents, strict=True) if x is not None]
        self._store.given, self._store.own = tensors, list(saved)
        try:
            with autograd_keys(grad=False), torch._C._DisableAutocast():
                return list(
                    torch.autograd.grad(
                        [edge for edge, _ in roots], self._leaves, [x for _, x in roots], allow_unused=True,
                        retain_graph=True,  # the caller may run backward again
                    )
                )  # fmt: skip
        finally:
            self._store.given, self._store.own = (), []


class _Span(NamedTuple):
    """Where a saved tensor lies: in a given tensor, or in one of the saved ones."""

    is_given: bool
    number: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class _Store:
    """The tensors that a graph saves; the graph refers to it, and it to no node."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.given: Sequence[Tensor] = ()
        self.own: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._spans = [(x.untyped_storage()._cdata, x.storage_offset(), x.storage_offset() + _extent(x)) for x in given]

    def pack(self, x: Tensor) -> _Span:
        storage, begin = x.untyped_storage(), int(x.storage_offset())
        for number, (key, first, end) in enumerate(self._spans):
            if key == storage._cdata and first <= begin and begin + _extent(x) <= end:
                return _Span(True, number, x.shape, x.stride(), int(begin - first))
        number = self._numbers.setdefault(storage._cdata, len(self.own))
        if number == len(self.own):
            self.own.append(x.as_strided((storage.nbytes() // x.itemsize,), (1,), 0))
        return _Span(False, number, x.shape, x.stride(), begin)

    def unpack(self, span: _Span) -> Tensor:
        base = (self.given if span.is_given else self.own)[span.number]
        return base.as_strided(span.shape, span.strides, base.storage_offset() + span.offset)


def _extent(x: Tensor) -> int:
    """Return the elements from the first to the last of a tensor."""
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _apart(result: Tensor, taken: set[int]) -> Tensor:
    """Return a result in a storage of its own."""
    if result.untyped_storage()._cdata in taken:
        result = result.clone(memory_format=torch.preserve_format)
    taken.add(result.untyped_storage()._cdata)
    return result
