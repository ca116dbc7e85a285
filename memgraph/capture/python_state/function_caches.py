"""Caches of functions that hold a tensor of a trace are emptied, or the function would return it from now on.

@lru_cache
def table(rows): return torch.arange(rows).sin()    ->   a captured step computes it in each run
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._pytree import tree_leaves

from ...errors import CaptureError
from ...graph.nodes import is_random
from ...guards.attribute_snapshot import AttributeSnapshot
from ...guards.cleared_caches import FunctionCache, clear


def empty_function_caches(before: AttributeSnapshot) -> None:
    """Empty the caches of functions that forward may call, if they hold tensors of a trace."""
    for cache, _ in _traced_caches(before):
        clear(cache)


def refuse_kept_draws(before: AttributeSnapshot) -> None:
    """Look into the caches within a trace.

    Raises:
        CaptureError: a cache of a function has a tensor that was made of random numbers. Each run would draw others.
    """
    mode = get_proxy_mode()
    assert mode is not None
    for cache, kept in _traced_caches(before):
        for tensor in kept:
            node = get_proxy_slot(tensor, mode.tracer, None, lambda slot: slot.proxy.node)
            if node is not None and any(map(is_random, _ancestors(node))):
                raise CaptureError(
                    f"forward draws random numbers in {cache.__qualname__}, whose results a cache of functions keeps: "
                    "eager draws once, and a captured step would draw in each run; keep them in a buffer"
                )


def _traced_caches(before: AttributeSnapshot) -> Iterator[tuple[Any, list[FakeTensor]]]:
    """Yield the caches of functions that forward may call and that hold tensors of a trace, with these."""
    classes = {kind for _, part in before.modules for kind in type(part).__mro__}
    found = [value for kind in classes for value in vars(kind).values()]
    found += [value for scope in before.outer.ran.scopes for value in scope.content().values()]
    for value in found:
        cache = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(cache, FunctionCache):
            kept = [leaf for content in gc.get_referents(cache) for leaf in _fakes(content)]
            if kept:
                yield cache, kept


def _fakes(content: Any) -> Iterator[FakeTensor]:
    """Yield the tensors of a trace in a part of a cache: a result, or the dict of all."""
    for leaf in tree_leaves(list(content.values()) if type(content) is dict else [content]):
        if isinstance(leaf, FakeTensor):
            yield leaf


def _ancestors(node: fx.Node) -> dict[fx.Node, None]:
    """Return a node and all that it is computed from."""
    found, left = dict[fx.Node, None](), [node]
    while left:
        if (each := left.pop()) not in found:
            found[each] = None
            left += each.all_input_nodes
    return found
