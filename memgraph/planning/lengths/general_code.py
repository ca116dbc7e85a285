"""Code of a planned step in which sizes are names, for all lengths with the same decisions.

view(x, [8 * s, 64])   ->   view(x, [size__0, 64])   ->   for length 100 with size__0 = 800

It is written and compiled once. What differs between lengths is the dict of global names that it reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from passes import Trace

from ...capture.sizes.at_lengths import SizedValues, graph_at
from ...capture.sizes.later_graph import LaterGraph
from ...capture.sizes.size_inputs import name_sizes
from ...graph.captured import Captured
from ...graph.halves.partition import Partition, partition
from ...graph.rewrite import rewrite
from ...tensors.traced_size import Number, SizeArgument

NAME = "memgraph_size_"


class NamedSize(SizeArgument):
    """A size that is written as a name."""

    name: str

    def __repr__(self) -> str:
        return self.name


class GeneralCode:
    """Both halves of a step with symbols that runs the text `applied`."""

    def __init__(self, graph: fx.Graph, applied: Trace, captured: Captured) -> None:
        self._sizes: dict[Any, NamedSize] = {}
        planned = rewrite(graph, applied)
        name_sizes(planned)
        for node in planned.nodes:
            node.args, node.kwargs = pytree.tree_map_only(SizeArgument, self._named, (node.args, dict(node.kwargs)))
        self.halves = partition(planned, captured.graph, captured.floats)

    def at(self, values: SizedValues) -> Partition:
        """Return the halves with numbers."""
        sizes = {size.name: values.number(size) for size in self._sizes.values()}
        backward = self.halves.backward
        return Partition(
            _half(self.halves.forward, values.number, sizes),
            None if backward is None else _half(backward, values.number, sizes),
            tuple(map(values.at, self.halves.tangents)),
            self.halves.tangent_names,
            self.halves.caller_values,
        )

    def _named(self, argument: SizeArgument) -> NamedSize:
        key = argument.size.node.expr
        if key not in self._sizes:
            self._sizes[key] = NamedSize(argument.size)
            self._sizes[key].name = f"{NAME}{len(self._sizes) - 1}"
        return self._sizes[key]


def _half(half: fx.GraphModule, number: Number, sizes: dict[str, int]) -> LaterGraph:
    return LaterGraph(half, partial(graph_at, half.graph, number), sizes)
