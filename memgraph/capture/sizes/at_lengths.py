"""The capture of a call with other lengths, from one in which these are symbols.

view(x, [8 * s])  of x: 8 x s    ->   view(x, [800])  of x: 8 x 100

Numbers are put in the place of symbols, in arguments and in fake values; nothing is traced or run. The graph is made
when it is first read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...graph.captured import Captured, Ref, View
from ...graph.nodes import fake_result, is_lazy
from ...tensors.traced_size import Number, SizeArgument, SizeTrace, has_sizes
from ..constant_fake_mode import ConstantFakeMode
from .later_graph import LaterGraph


def at_lengths(general: Captured, trace: SizeTrace, lengths: Sequence[int]) -> Captured:
    """Return a captured call with these lengths, for which the trace has to hold."""
    number = trace.at(lengths)
    graph = LaterGraph(general.graph, partial(graph_at, general.graph.graph, number))
    leaves = tuple(_leaf(leaf, number) for leaf in general.leaves)
    return replace(general, graph=graph, leaves=leaves, writes=general.writes.at(lambda leaf: _leaf(leaf, number)))


def graph_at(general: fx.Graph, number: Number) -> fx.Graph:
    """Return a graph with numbers in the place of symbols."""
    values = SizedValues(number)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.set_codegen(type(general._codegen)())
    for node in general.nodes:
        copies[node] = copy_at(node, graph, copies, values)
    return graph


def copy_at(node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node], values: SizedValues) -> fx.Node:
    """Append the copy of a node with numbers to a graph."""
    copy = graph.node_copy(node, copies.__getitem__)
    if has_sizes(node):
        copy.args, copy.kwargs = pytree.tree_map_only(SizeArgument, values.number, (copy.args, copy.kwargs))
    copy.meta = dict(node.meta)
    if "val" in node.meta:
        is_computed = is_lazy(node) and node.op == "call_function"
        copy.meta["val"] = fake_result(copy, values.mode) if is_computed else values.at(node.meta["val"])
    return copy


class SizedValues:
    """Fake values with numbers in place of symbols; those that share a storage still do."""

    def __init__(self, number: Number) -> None:
        self.number, self.mode = number, ConstantFakeMode()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def at(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        return pytree.tree_map_only(Tensor, self._tensor, value)

    def _tensor(self, fake: Tensor) -> Tensor:
        symbolic = fake.untyped_storage()
        storage = self._storages.get(symbolic._cdata)
        if storage is None:
            storage = torch.UntypedStorage(self.number(symbolic.nbytes()), device="meta")
            self._storages[symbolic._cdata] = storage
        sizes, strides = [*map(self.number, fake.shape)], [*map(self.number, fake.stride())]
        with _disable_current_modes(), torch.no_grad():
            empty = torch.empty(0, dtype=fake.dtype, device="meta")
            empty.set_(storage, self.number(fake.storage_offset()), sizes, strides)
        return FakeTensor(self.mode, empty, fake.device)


def _leaf(leaf: Any, number: Number) -> Any:
    """Return a part of the module's result, or of what it writes, with the sizes that it has."""
    if isinstance(leaf, SizeArgument):
        return number(leaf)
    if isinstance(leaf, torch.Size):
        return torch.Size(map(number, leaf))
    if not isinstance(leaf, Ref) or leaf.view is None:
        return leaf
    view = leaf.view
    sizes = tuple(map(number, view.shape)), tuple(map(number, view.stride)), number(view.offset)
    return replace(leaf, view=View(*sizes, view.detached))
