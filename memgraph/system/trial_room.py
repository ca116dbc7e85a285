"""The bytes that are left for ops which run while a call is captured, to learn what they return.

with ops_within(1 << 20): ...   ->   in the block, `trial_room()` is a mebibyte
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_room = ContextVar("_room", default=1 << 62)


def trial_room() -> int:
    """Return the bytes that are left."""
    return _room.get()


@contextmanager
def ops_within(room: int) -> Iterator[None]:
    """Run ops in so many bytes, within the block."""
    reset = _room.set(room)
    try:
        yield
    finally:
        _room.reset(reset)
