"""Pause Python's collector of reference cycles.

with paused_collector():
    ...    # many objects are made, and nearly all of them stay

A trace makes about a hundred objects for each op. The collector would walk over all of them again and again, which is a
tenth of a capture's time, and would find next to nothing: what capture drops is freed by its reference count.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no cycles inside the block, unless it asks for it; a caller that has paused the collector keeps that."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
