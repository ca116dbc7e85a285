"""The content of things that have it neither in attributes nor as containers, and the key of things that have none.

np.array([1, 2])   ->   its shape, dtype and bytes
{"a": 1}.get       ->   the dict
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
import weakref
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

MAX_ARRAY_NBYTES = 1 << 20  # larger arrays are compared by identity
BUFFERS = (bytearray, array, memoryview, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)


class IdentityKey:
    """A key that is equal for one object only, and not for a later one at its address."""

    def __init__(self, thing: Any) -> None:
        self.number = id(thing)
        try:
            self.target: Callable[[], Any] = weakref.ref(thing)  # so that a key keeps no tensor alive
        except TypeError:
            self.target = lambda: thing

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, IdentityKey) and (own := self.target()) is not None and own is other.target()

    def __repr__(self) -> str:
        return f"IdentityKey({self.target()!r:.60})"


def inside_of(thing: Any) -> Sequence[Any]:
    """Return what a thing leads to that is no container and has it in no attributes."""
    if isinstance(thing, functools.partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, types.BuiltinMethodType):  # of an object, as `{}.get`
        return () if isinstance(thing.__self__, types.ModuleType | type | None) else (thing.__self__,)
    if isinstance(thing, BaseException):
        return thing.args
    return [*thing.flat] if is_array(thing) and holds_objects(thing) else ()


def holds_objects(array: Any) -> bool:
    return not isinstance(array, BUFFERS) and bool(array.dtype.hasobject)


def is_array(thing: Any) -> bool:
    """Return True for what has its content in a buffer: arrays of numpy and of Python."""
    numpy = sys.modules.get("numpy")
    return isinstance(thing, BUFFERS) or (numpy is not None and isinstance(thing, numpy.ndarray | numpy.generic))


def array_content(array: Any) -> Hashable:
    """Return the content of an array without objects."""
    if isinstance(array, BUFFERS):
        return bytes(array)
    by_identity = array.nbytes > MAX_ARRAY_NBYTES
    return array.shape, str(array.dtype), IdentityKey(array) if by_identity else array.tobytes()
