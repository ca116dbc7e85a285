"""Drop the sources of compiled graphs, which torch.fx keeps for tracebacks until the process ends.

with forgotten_sources():
    ...    # graphs are compiled, and most of them dropped
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import graph_module


@contextmanager
def forgotten_sources() -> Iterator[None]:
    """Drop the source of each graph that is compiled inside; tracebacks then show no lines of it."""
    # If torch keeps them elsewhere they stay, at a few kB for each graph.
    texts: dict[str, str] = getattr(getattr(graph_module, "_loader", None), "eval_cache", {})
    before = set(texts)
    try:
        yield
    finally:
        for name in texts.keys() - before:
            texts.pop(name, None)
            linecache.cache.pop(name, None)
