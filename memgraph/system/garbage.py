"""Keep Python's garbage collector from looking at many objects in vain.

with collecting_new_objects(): ...    transformers is imported, a million objects: only those of the block are looked at
with paused_collector(): ...          nearly all that the block makes stays: nothing is looked at

A collection of a million objects takes 0.2 s, and planning a call causes several. A trace makes about a hundred objects
for each op. The collector would walk over all of them again and again, which is a tenth of a capture's time, and would
find next to nothing: what capture drops is freed by its reference count.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

count_frozen = gc.get_freeze_count


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Leave objects that exist now out of collections until the block ends, unless the caller has frozen some."""
    freezes = gc.isenabled() and not count_frozen()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


def all_objects() -> list[Any]:
    """Return all objects that the collector knows; from now on, none is left out of collections."""
    if count_frozen():
        gc.unfreeze()
    return gc.get_objects()


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
