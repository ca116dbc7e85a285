"""The layout of an op's results in memory.

native_layer_norm under autocast:   the fake result has statistics bf16[8, 1], the CPU kernel's are f32[8, 1]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .nodes import all_storages, tensors

REAL = "real"  # in a node's meta: its fake value was corrected, and differs from what its op gives on fake tensors

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]  # dtype, shape, strides


class ResultLayout(NamedTuple):
    """Layout of a result, the first element in its storage, and the storage's bytes."""

    layout: Layout
    offset: int
    nbytes: int


def layout(tensor: Tensor) -> Layout:
    """Return dtype, shape and strides; strides of dimensions of one element have no effect, and are 0."""
    strides = tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.dtype, tuple(tensor.shape), strides


def layout_in_storage(tensor: Tensor) -> ResultLayout:
    """Return the layout of a tensor in its storage, which may be larger."""
    return ResultLayout(layout(tensor), int(tensor.storage_offset()), tensor.untyped_storage().nbytes())


def empty(form: Layout, device: torch.device) -> Tensor:
    """Return an empty tensor of this layout."""
    dtype, shape, strides = form
    strides = tuple(1 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def clone_fake_value(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return a fake value of the same layout as a corrected node's, in storages of its own."""
    return value_like(node, tuple(map(layout_in_storage, tensors(node))), mode)


def empty_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor of the same layout, in a storage of its own."""
    return _empty(tensor, layout_in_storage(tensor), mode)


def value_like(node: fx.Node, layouts: tuple[ResultLayout, ...], mode: FakeTensorMode) -> Any:
    """Return the node's value with these layouts; tensors that share storages with the node's inputs stay."""
    leaves, form = tree_flatten(node.meta["val"])
    inputs = all_storages(node.all_input_nodes)
    rest = iter(layouts)
    new: list[Any] = []
    for leaf in leaves:
        target = next(rest) if isinstance(leaf, Tensor) else None
        is_own = target is not None and leaf.untyped_storage()._cdata not in inputs
        new.append(_empty(leaf, target, mode) if is_own and target is not None else leaf)
    return tree_unflatten(new, form)


def _empty(old: Tensor, target: ResultLayout, mode: FakeTensorMode) -> Tensor:
    with mode:
        new = empty(target.layout, old.device)
        storage = new.untyped_storage()
        if storage.nbytes() == target.nbytes and not target.offset:
            return new
        storage.resize_(target.nbytes)
        return new.as_strided(new.shape, new.stride(), target.offset)
