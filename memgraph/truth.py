"""Correct the fake values of a graph where real ops make something else.

    native_layer_norm under autocast:   fake says bf16[8, 1] for its statistics, the CPU's kernel makes f32[8, 1]

A forecast is made of fake values, so it is as true as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .nodes import all_storages, derived, tensors
from .probe import Made, is_view, made_of

REAL = "real"  # in a node's meta: its fake value is not what its op would give on fake tensors


def correct(graph: fx.Graph, mode: FakeTensorMode, made: Callable[[fx.Node], tuple[Made, ...] | None]) -> None:
    """Give every op that makes something else than its fake value the value that it makes, and its views after it."""
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_view(node):
            if not changed.isdisjoint(node.all_input_nodes):
                node.meta["val"] = derived(node, mode)
                changed.add(node)
            continue
        real, expected = made(node), tuple(map(made_of, tensors(node)))
        # Where a kernel leaves out a result that was not asked for, the fake one only makes the forecast too high.
        if real is not None and len(real) == len(expected) and real != expected:
            node.meta |= {"val": _like(node, real, mode), REAL: True}
            changed.add(node)


def again(node: fx.Node, mode: FakeTensorMode) -> Any:
    """A new fake value like that of a corrected node, in storages of its own."""
    return _like(node, tuple(map(made_of, tensors(node))), mode)


def empty_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor like this one, in a storage of its own."""
    return _empty(tensor, made_of(tensor), mode)


def _like(node: fx.Node, made: tuple[Made, ...], mode: FakeTensorMode) -> Any:
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


def _empty(old: Tensor, lies: Made, mode: FakeTensorMode) -> Tensor:
    dtype, shape, strides = lies.layout
    strides = tuple(1 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    with mode:
        new = old.new_empty_strided(shape, strides, dtype=dtype)
        storage = new.untyped_storage()
        if storage.nbytes() == lies.nbytes and not lies.offset:
            return new
        storage.resize_(lies.nbytes)
        return new.as_strided(shape, strides, lies.offset)
