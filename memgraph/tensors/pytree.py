"""Flatten any nesting of tensors to a list, and rebuild it.

    flatten({"x": x, "k": 3})   ->  [x, 3], spec
    unflatten([y, 3], spec)     ->  {"x": y, "k": 3}

`torch.utils._pytree` opens the containers that it knows. Any other object (a key-value cache, a dataclass) is pickled
in memory without its tensors and floats, and rebuilt by an unpickler that inserts the given ones.
"""

from __future__ import annotations

import enum
import io
import pickle
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from .traced_number import TracedFloat
from .traced_size import SYMBOLIC

CONSTANTS = (
    types.NoneType, bool, int, float, complex, str, bytes, enum.Enum, range, types.EllipsisType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator,
)  # fmt: skip
DICTS = dict, OrderedDict
# Compared by identity; never opened.
OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


@dataclass(frozen=True)
class Shell:
    """A pickled object without its tensors and floats, and the classes and functions that it refers to."""

    blob: bytes
    named: tuple[Any, ...]
    leaves: int


@dataclass(frozen=True)
class Spec:
    """A tree without its leaves; hashable, and equal for trees of the same structure."""

    tree: pytree.TreeSpec
    shells: tuple[Shell | None, ...]  # one per leaf of `tree`
    keys: tuple[type, ...] = ()  # the types of keys of dicts, as 1 == True, if any is no text

    @property
    def leaves(self) -> int:
        """The number of leaves."""
        return sum(1 if shell is None else shell.leaves for shell in self.shells)


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """Return the leaves of a tree, tensors and constants, and its structure."""
    tops, form = pytree.tree_flatten(tree)
    leaves: list[Any] = []
    shells: list[Shell | None] = []
    for top in tops:
        plain = isinstance(top, (Tensor, *CONSTANTS, *OPAQUE))
        shell, parts = (None, [top]) if plain else _open(top)
        shells.append(shell)
        leaves.extend(parts)
    keys = tuple(_key_types(form))
    return leaves, Spec(form, tuple(shells), keys if set(keys) - {str} else ())


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    """Return the tree of this structure with these leaves."""
    if len(leaves) != spec.leaves:
        raise ValueError(f"{spec.leaves} leaves belong to this tree, {len(leaves)} were given")
    rest = iter(leaves)
    tops = [
        next(rest) if shell is None else _Unpickler(shell, [next(rest) for _ in range(shell.leaves)]).load()
        for shell in spec.shells
    ]
    return _built(spec.tree, iter(tops)) if _has_size(spec.tree) else pytree.tree_unflatten(tops, spec.tree)


def _key_types(tree: pytree.TreeSpec) -> Iterator[type]:
    """Yield the types of the keys of dicts."""
    if tree.num_nodes > 1:
        keys = tree.context[1] if tree.type is defaultdict else tree.context if tree.type in DICTS else ()
        yield from map(type, keys)
        for child in tree.children():
            yield from _key_types(child)


@lru_cache(1024)
def _has_size(tree: pytree.TreeSpec) -> bool:
    return tree.type is torch.Size or any(map(_has_size, tree.children()))


def _built(tree: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    """Return a tree, in which a `torch.Size` is one: torch makes a tuple of it."""
    if tree.is_leaf():
        return next(leaves)
    children = [_built(child, leaves) for child in tree.children()]
    if tree.type is torch.Size:
        return torch.Size(children)
    return pytree.SUPPORTED_NODES[tree.type].unflatten_fn(children, tree.context)


def tensors_of(leaves: Sequence[object]) -> list[Tensor]:
    """Return the distinct tensors among leaves, in order: `f(x, x)` reads one."""
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


def _open(top: Any) -> tuple[Shell | None, list[Any]]:
    pickler = _Pickler()
    try:
        pickler.dump(top)
    except Exception as error:
        name = f"{type(top).__module__}.{type(top).__qualname__}"
        raise CaptureError(
            f"an argument or an output is a {name}, which can't be taken apart into tensors: {error}\n"
            "pass tensors in tuples, lists, dicts or picklable objects, or register the class with torch.utils._pytree"
        ) from error
    return Shell(pickler.blob.getvalue(), tuple(pickler.named), len(pickler.leaves)), pickler.leaves


class _Pickler(pickle.Pickler):
    """Replaces tensors, floats, classes and functions by positions."""

    def __init__(self) -> None:
        self.blob = io.BytesIO()
        super().__init__(self.blob, protocol=pickle.HIGHEST_PROTOCOL)
        self.leaves: list[Any] = []
        self.named: list[Any] = []

    def persistent_id(self, thing: Any) -> tuple[str, int] | None:
        if isinstance(thing, Tensor) or type(thing) in (float, TracedFloat):
            self.leaves.append(thing)
            return "leaf", len(self.leaves) - 1
        if type(thing) in SYMBOLIC:
            raise TypeError("it has a length that is to be any")
        if isinstance(thing, OPAQUE):
            self.named.append(thing)
            return "named", len(self.named) - 1
        return None


class _Unpickler(pickle.Unpickler):
    """Puts the given leaves, and the classes and functions, at their positions."""

    def __init__(self, shell: Shell, leaves: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(shell.blob))
        self.stored = {"leaf": leaves, "named": shell.named}

    def persistent_load(self, place: tuple[str, int]) -> Any:
        kind, index = place
        return self.stored[kind][index]
