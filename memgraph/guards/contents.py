"""The content of things that have it neither in attributes nor as containers, and the key of things that have none.

np.array([1, 2])   ->   its shape, dtype and bytes
{"a": 1}.get       ->   the dict
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
import sys
import threading
import types
import weakref
from argparse import Namespace
from array import array
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from .cleared_caches import FunctionCache, cleared

MAX_ARRAY_NBYTES = 1 << 20  # larger arrays are compared by identity
# Objects that have their state elsewhere than in attributes -> that state.
STATES: Mapping[type, Callable[[Any], Any]] = {
    type(os.environ): lambda environ: environ._data,
    ContextVar: lambda variable: variable.get(None),
    threading.local: vars,
    types.MappingProxyType: dict,
    FunctionCache: cleared,
    logging.Logger: lambda logger: _logger(logger),
}
OF_LOGGERS = {*vars(logging.Logger("")), "manager"}  # their own attributes


def _logger(logger: logging.Logger) -> Any:
    """Return the level of a logger, with the attributes that code has given it, if there are any."""
    level = max(logger.getEffectiveLevel(), logger.manager.disable + 1)
    added = [each for name, value in vars(logger).items() if name not in OF_LOGGERS for each in (name, value)]
    return (level, *added) if added else level


WEAK: dict[type, Callable[[Any], Any]] = {
    weakref.WeakKeyDictionary: dict,
    weakref.WeakValueDictionary: dict,
    weakref.WeakSet: dict.fromkeys,
}
NAMESPACES = (types.SimpleNamespace, Namespace, UserDict, UserList)
CONTAINERS = (OrderedDict, defaultdict, dict, list, tuple, deque, set, frozenset)
PLAIN: Mapping[Any, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}
INEXACT = float, complex, slice, range  # 0.0 == -0.0, nan != nan, range(0, 9, 4) == range(0, 12, 4)
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


def constant_key(constant: Any) -> tuple[type, Any]:
    """Return a key that is another one for each two constants that code can tell apart."""
    return type(constant), repr(constant) if isinstance(constant, INEXACT) else constant


def container_of(thing: Any) -> Any:
    """Return the class of Python's whose container a thing is; None if it is none, whatever it passes for."""
    kind = type(thing)
    return next((base for base in CONTAINERS if issubclass(kind, base)), None)


def plain_items(mapping: dict[Any, Any]) -> tuple[Any, ...]:
    return *mapping, *mapping.values()


def all_items(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the items in their order, whatever a class says of them."""
    base: Any = OrderedDict if issubclass(type(mapping), OrderedDict) else dict
    return list(base.items(mapping))


def value_of(thing: Any) -> Any:
    """Return the number or the text that an instance of a class of one's own is; None for another thing."""
    kind = type(thing)
    return next((read(thing) for base, read in PLAIN.items() if issubclass(kind, base)), None)


def inside_of(thing: Any) -> Sequence[Any]:
    """Return what a thing leads to that is no container and has it in no attributes."""
    if isinstance(thing, functools.partial | functools.partialmethod):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, types.BuiltinMethodType):  # of an object, as `{}.get`
        return () if isinstance(thing.__self__, types.ModuleType | type | None) else (thing.__self__,)
    if isinstance(thing, BaseException):
        return thing.args
    return [*thing.flat] if is_array(thing) and holds_objects(thing) else ()


def reached_from(thing: Any, most: int) -> Sequence[Any]:
    """Return what a thing leads to otherwise than by its attributes, if that is no more than `most`."""
    kind, base = type(thing), container_of(thing)
    if base is not None:
        if base.__len__(thing) > most:
            return ()
        return [value for _, value in all_items(thing)] if issubclass(base, dict) else [*base.__iter__(thing)]
    if kind in STATES and kind is not FunctionCache:
        return [*state_contents(STATES[kind](thing))][:most]
    if isinstance(thing, types.CellType):
        return gc.get_referents(thing)
    found = referents_of(thing) if is_weak(thing) else inside_of(thing)
    return [*found[:most], *(getattr(thing, name, None) for name in slots(thing))]


def is_weak(thing: Any) -> bool:
    """Return True for a weak reference, a container of these, or a proxy, which passes for what it stands for."""
    return type(thing) in WEAK or issubclass(type(thing), (weakref.ref, *weakref.ProxyTypes))


def referents_of(weak: Any) -> tuple[Any, ...]:
    """Return what a weak reference, a proxy or a container of such references leads to now."""
    kind: Any = type(weak)
    if kind in WEAK:
        return (WEAK[kind](weak),)
    if issubclass(kind, weakref.ref):
        found = weak()
        return (found.__self__, found.__func__) if isinstance(found, types.MethodType) else (found,)
    try:
        return (weak.__init__.__self__,)  # the method that a proxy finds is bound to it
    except ReferenceError:
        return (None,)


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
    return array.shape, array.strides, str(array.dtype), IdentityKey(array) if by_identity else array.tobytes()


def slots(thing: Any) -> tuple[str, ...]:
    """Return the names of the `__slots__` of a thing's class, and of its bases'."""
    kind: Any = type(thing)
    return _slots_of(kind)


@functools.lru_cache(4096)
def _slots_of(kind: Any) -> tuple[str, ...]:
    """Leave out private ones of this package's own classes, which stand for other objects."""
    groups = [(base.__name__.lstrip("_"), vars(base).get("__slots__", ())) for base in kind.__mro__]
    is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    names = [
        f"_{base}{name}" if name.startswith("__") and not name.endswith("__") and base else name
        for base, group in groups
        for name in ((group,) if isinstance(group, str) else tuple(group))
        if not (is_ours and name.startswith("__"))
    ]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and hasattr(kind, name))


def state_contents(state: Any) -> Iterable[Any]:
    if isinstance(state, tuple):
        return state
    return (*state, *state.values()) if isinstance(state, dict) else (state,)


def mutable_layout(tensor: Any) -> Hashable:
    """Return what may change of a tensor while it stays the same one."""
    return tensor if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
