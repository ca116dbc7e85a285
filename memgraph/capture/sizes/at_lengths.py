"""The capture of a call with other lengths, from one in which these are symbols.

view(x, [8 * s])  of x: 8 x s    ->   view(x, [800])  of x: 8 x 100

Numbers are put in the place of symbols, in arguments and in fake values; nothing is traced or run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...graph.captured import Captured, Ref, View
from ...graph.nodes import fake_result, is_lazy
from ...tensors.traced_size import SizeArgument, SizeTrace, has_sizes
from ..constant_fake_mode import ConstantFakeMode

Number = Callable[[Any], int]


def at_lengths(general: Captured, trace: SizeTrace, lengths: Sequence[int]) -> Captured:
    """Return a captured call with these lengths, for which the trace has to hold."""
    number, mode = trace.at(lengths), ConstantFakeMode()
    values = _Values(number, mode)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in general.graph.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if has_sizes(node):
            copy.args, copy.kwargs = pytree.tree_map_only(SizeArgument, number, (copy.args, copy.kwargs))
        copy.meta = dict(node.meta)
        if "val" in node.meta:
            copy.meta["val"] = fake_result(copy, mode) if is_lazy(node) else values.at(node.meta["val"])
    leaves = tuple(_leaf(leaf, number) for leaf in general.leaves)
    return replace(general, graph=fx.GraphModule(general.graph, graph), leaves=leaves)


class _Values:
    """Fake values with numbers in place of symbols; those that share a storage still do."""

    def __init__(self, number: Number, mode: ConstantFakeMode) -> None:
        self.number, self.mode = number, mode
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
    """Return a part of the module's result, with the sizes that it has."""
    if isinstance(leaf, SizeArgument):
        return number(leaf)
    if not isinstance(leaf, Ref) or leaf.view is None:
        return leaf
    view = leaf.view
    sizes = tuple(map(number, view.shape)), tuple(map(number, view.stride)), number(view.offset)
    return replace(leaf, view=View(*sizes, view.detached))
