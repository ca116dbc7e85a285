"""The texts of compiled graphs, which torch.fx keeps for tracebacks as long as the process lives: let go again.

with forgotten_sources():
    ...    # graphs are made, compiled and mostly dropped
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import graph_module


@contextmanager
def forgotten_sources() -> Iterator[None]:
    """Forget the source of each graph that is compiled inside; tracebacks through it show no lines then."""
    # Where torch keeps them elsewhere, they stay: some kB for each graph.
    texts: dict[str, str] = getattr(getattr(graph_module, "_loader", None), "eval_cache", {})
    before = set(texts)
    try:
        yield
    finally:
        for name in texts.keys() - before:
            texts.pop(name, None)
            linecache.cache.pop(name, None)
