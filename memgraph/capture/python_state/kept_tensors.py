"""Tensors of a trace that forward keeps where no snapshot looks.

@lru_cache of a function that makes a table    ->   emptied: the function would return the trace's tensor from now on
a threading.local, a dict in a dict in a dict  ->   the entry is removed, and the call refused

A captured step computes such a table in each run. What eager finds in its second call would be another thing if it
depended on an input, and a cache of a function does not.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from ...errors import CaptureError
from ...guards.attribute_snapshot import AttributeSnapshot
from ...system.garbage import all_objects

FunctionCache = type(functools.lru_cache(lambda: None))
Traced = list["weakref.ref[Tensor]"]
_traced = ContextVar[Traced | None]("_traced", default=None)


@contextmanager
def noting_tensors() -> Iterator[Traced]:
    """Note the tensors of all traces of the block."""
    traced: Traced = []
    reset = _traced.set(traced)
    try:
        yield traced
    finally:
        _traced.reset(reset)


def note_tensors(results: Any) -> None:
    """Note the results of an op of a trace."""
    traced = _traced.get()
    if traced is not None:
        traced += [weakref.ref(leaf) for leaf in tree_leaves(results) if isinstance(leaf, FakeTensor)]


def empty_function_caches(before: AttributeSnapshot) -> None:
    """Empty the caches of functions that forward may call and that hold tensors of a trace: the next has others."""
    classes = {kind for _, part in before.modules for kind in type(part).__mro__}
    found = [value for kind in classes for value in vars(kind).values()]
    found += [value for scope in before.outer.scopes.scopes for value in scope.content().values()]
    for value in found:
        cache = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(cache, FunctionCache) and any(map(_is_traced, gc.get_referents(cache))):
            cache.cache_clear()


def release_tensors(traced: Traced, graph: fx.Graph) -> None:
    """Empty the caches of functions that hold tensors of the traces of this graph, which are garbage by now.

    Raises:
        CaptureError: something else holds one.
    """
    if not _alive(traced, _values(graph.nodes)):
        return
    own = _values(thing for thing in gc.get_objects() if type(thing) is fx.Node)  # also of graphs that were changed
    if not _alive(traced, own):
        return
    with all_objects():
        for tensor in _alive(traced, own):
            for cache in _caches(tensor):
                cache.cache_clear()
        del tensor
        gc.collect()
        for tensor in _alive(traced, own):
            _refuse_kept(tensor)


def _values(nodes: Iterable[fx.Node]) -> set[int]:
    """Return the ids of the fake values of nodes."""
    return {id(leaf) for node in nodes for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)}


def _refuse_kept(tensor: Tensor) -> None:
    """Remove a tensor from the dicts that hold it. Those that only torch's C++ holds, no call finds again.

    Raises:
        CaptureError: there are such dicts.
    """
    holders = [holder for holder in gc.get_referrers(tensor) if isinstance(holder, dict)]
    for holder in holders:
        for key in [key for key, value in holder.items() if value is tensor]:
            del holder[key]
    if holders:
        raise CaptureError(
            f"forward keeps a tensor {tuple(tensor.shape)} in a dict outside of the module's attributes, where its "
            "next call would find it: make it in each call, or a buffer (register_buffer), or run the plain module "
            "once before it is compiled, with this input"
        )


def _is_traced(content: Any) -> bool:
    held = content.values() if type(content) is dict else (content,)
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(list(held)))


def _alive(traced: Traced, own: set[int]) -> list[Tensor]:
    tensors = (reference() for reference in traced)
    return [tensor for tensor in tensors if tensor is not None and id(tensor) not in own]


def _caches(tensor: Tensor) -> list[Any]:
    """Return the caches of functions that hold a tensor, maybe in a container."""
    near = gc.get_referrers(tensor)
    outer = [holder for each in near if type(each) in (dict, list, tuple) for holder in gc.get_referrers(each)]
    return [holder for holder in (*near, *outer) if isinstance(holder, FunctionCache)]
