"""Count how often the caches of functions (`functools.lru_cache`) are emptied.

    table.cache_clear()    ->   cleared(table) is another number: what the function returns may be new

Each cache counts its misses, and begins at none once it is emptied.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

FunctionCache: Any = type(functools.lru_cache(lambda: None))

_known = WeakKeyDictionary[Any, tuple[int, int]]()  # by cache: how often it was emptied, and its misses when last seen


def cleared(cache: Any) -> int:
    """Return how often a cache was seen to be emptied."""
    count, before = _known.get(cache, (0, 0))
    misses = cache.cache_info().misses
    count += misses < before
    _known[cache] = count, misses
    return count


def clear(cache: Any) -> None:
    """Empty a cache of what a trace has left there, which does not count."""
    count = cleared(cache)
    cache.cache_clear()
    _known[cache] = count, 0
