"""The sizes of a call's tensors that are symbols while it is traced.

x of 8 x 128, then of 8 x 120, and y of 128, then of 120    ->   x of 8 x s, y of s, and s was 120
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from ...graph.captured import Input
from ...guards.assumptions import SizePlace, dense_stride
from ...tensors.traced_size import SizeTrace, with_arguments


@dataclass
class SizeInputs:
    """The sizes of one call that are to be symbols.

    Attributes:
        places: the symbol of each dimension that has one.
        lengths: by symbol, in this call.
        leaves: for the call's tensors in order, the leaf that each is.
        trace: the latest trace.
    """

    places: Mapping[SizePlace, int]
    lengths: Sequence[int]
    leaves: Sequence[int]
    trace: SizeTrace = field(init=False)

    @contextmanager
    def tracing(self) -> Iterator[SizeTrace]:
        """Begin a trace."""
        self.trace = SizeTrace(self.lengths)
        with self.trace.recording():
            yield self.trace

    def layout(self, role: Input, shape: Sequence[int], strides: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Return shape and strides of an input, with symbols.

        A dimension with a symbol makes those strides symbolic that span it in a dense tensor.
        """
        leaf = self.leaves[role.index] if role.kind == "input" else -1
        if not any((leaf, dim) in self.places for dim in range(len(shape))):
            return list(shape), list(strides)
        sizes = [self._size(leaf, dim, size) for dim, size in enumerate(shape)]
        spans = [dense_stride(shape, dim) == stride for dim, stride in enumerate(strides)]
        symbolic = [
            any((leaf, inner) in self.places for inner in range(dim + 1, len(shape))) for dim in range(len(shape))
        ]
        return sizes, [
            prod(sizes[dim + 1 :]) if spans[dim] and symbolic[dim] else stride for dim, stride in enumerate(strides)
        ]

    def _size(self, leaf: int, dim: int, size: int) -> Any:
        symbol = self.places.get((leaf, dim))
        return size if symbol is None else self.trace.sizes[symbol]


def name_sizes(graph: fx.Graph) -> None:
    """Write symbols that passes over a graph have put into it as numbers that know them."""
    for node in graph.nodes:
        node.args, node.kwargs = with_arguments((node.args, dict(node.kwargs)))
