"""Caches of functions that hold a tensor of a trace are emptied, or the function would return it from now on.

@lru_cache
def table(rows): return torch.arange(rows).sin()    ->   a captured step computes it in each run
"""

from __future__ import annotations

import gc
from typing import Any

from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from ...guards.attribute_snapshot import AttributeSnapshot
from ...guards.cleared_caches import FunctionCache, clear


def empty_function_caches(before: AttributeSnapshot) -> None:
    """Empty the caches of functions that forward may call, if they hold tensors of a trace."""
    classes = {kind for _, part in before.modules for kind in type(part).__mro__}
    found = [value for kind in classes for value in vars(kind).values()]
    found += [value for scope in before.outer.ran.scopes for value in scope.content().values()]
    for value in found:
        cache = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(cache, FunctionCache) and any(map(_is_traced, gc.get_referents(cache))):
            clear(cache)


def _is_traced(content: Any) -> bool:
    """Return True if a part of a cache, a result or the dict of all, has a tensor of a trace."""
    held = list(content.values()) if type(content) is dict else [content]
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(held))
