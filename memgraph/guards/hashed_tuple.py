"""A tuple that computes its hash once.

    key = (1000 shapes)      hash(key)  # 1000 hashes, each time
    key = HashedTuple(key)   hash(key)  # 1000 hashes, the first time

It is equal to the plain tuple, and has its hash. The key of a call is looked up several times.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any


class HashedTuple(tuple[Any, ...]):
    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash
