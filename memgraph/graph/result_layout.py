"""How the results of an op are laid out in memory.

native_layer_norm under autocast:   fake says bf16[8, 1] for its statistics, the CPU kernel makes f32[8, 1]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .nodes import all_storages, tensors

REAL = "real"  # in a node's meta: its fake value is not what its op would give on fake tensors

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]  # dtype, shape, strides


class ResultLayout(NamedTuple):
    """How a result lies in memory: its layout, the element of its storage at which it begins, the storage's bytes."""

    layout: Layout
    offset: int
    nbytes: int


def layout(tensor: Tensor) -> Layout:
    """How a tensor lies in memory; the strides of dimensions of one element say nothing, and are 0."""
    strides = tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.dtype, tuple(tensor.shape), strides


def layout_in_storage(tensor: Tensor) -> ResultLayout:
    """How a tensor lies in its storage, which may be larger than it."""
    return ResultLayout(layout(tensor), int(tensor.storage_offset()), tensor.untyped_storage().nbytes())


def clone_fake_value(node: fx.Node, mode: FakeTensorMode) -> Any:
    """A new fake value like that of a corrected node, in storages of its own."""
    return _like(node, tuple(map(layout_in_storage, tensors(node))), mode)


def empty_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor like this one, in a storage of its own."""
    return _empty(tensor, layout_in_storage(tensor), mode)


def _like(node: fx.Node, made: tuple[ResultLayout, ...], mode: FakeTensorMode) -> Any:
    """The node's value with tensors that lie as `made` says; what it took over from its inputs stays."""
    leaves, form = tree_flatten(node.meta["val"])
    given = all_storages(node.all_input_nodes)
    rest = iter(made)
    new: list[Any] = []
    for leaf in leaves:
        lies = next(rest) if isinstance(leaf, Tensor) else None
        mine = lies is not None and leaf.untyped_storage()._cdata not in given
        new.append(_empty(leaf, lies, mode) if mine and lies is not None else leaf)
    return tree_unflatten(new, form)


def _empty(old: Tensor, lies: ResultLayout, mode: FakeTensorMode) -> Tensor:
    dtype, shape, strides = lies.layout
    strides = tuple(1 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    with mode:
        new = old.new_empty_strided(shape, strides, dtype=dtype)
        storage = new.untyped_storage()
        if storage.nbytes() == lies.nbytes and not lies.offset:
            return new
        storage.resize_(lies.nbytes)
        return new.as_strided(shape, strides, lies.offset)
