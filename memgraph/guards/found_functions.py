"""Find the function that code belongs to, and what it holds: an event has the code alone.

def forward(self, x): ...        ->   by its qualified name
making(3), with lambda x: x*n    ->   of the functions with this code, that whose cells have what the frame has
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from ..system.garbage import all_objects
from .cleared_caches import FunctionCache
from .module_attributes import CONSTANTS
from .variable_scope import cell_contents

MISSING = object()
INNER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>")  # which no function of its own was made for
WRAPPERS = (
    FunctionType, MethodType, staticmethod, classmethod, property, functools.partial, functools.partialmethod,
    functools.cached_property, FunctionCache,
)  # fmt: skip
AROUND = ("__func__", "__wrapped__", "func", "fget", "fset")  # attributes in which these have a function

_kept_defaults = WeakKeyDictionary[FunctionType, dict[str, Any]]()


def codes(function: Any) -> Iterator[CodeType]:
    """Yield the code of a callable, and of those that it wraps."""
    for name in AROUND:
        if (inner := getattr(function, name, None)) is not None:
            yield from codes(inner)
    call = function if isinstance(function, FunctionType) else getattr(type(function), "__call__", None)  # noqa: B004
    if isinstance(call, FunctionType):
        yield call.__code__


class FoundFunctions:
    """Finds the functions with the code of a frame: several may have it, with other closures and defaults."""

    def __init__(self) -> None:
        self._noted: dict[CodeType, list[FunctionType]] = {}

    def note(self, function: FunctionType) -> None:
        """Add one that attributes, classes or closures lead to."""
        self._noted.setdefault(function.__code__, []).append(function)

    def of(self, frame: FrameType, entered: Collection[CodeType]) -> Sequence[FunctionType]:
        """Return those of a frame; code that was `entered` may have made one, which is then not searched for."""
        code = frame.f_code
        if code.co_name in INNER:
            return ()
        if not code.co_freevars and (found := by_name(code, frame.f_globals)) is not None:
            return (found,)
        if not code.co_freevars and not code.co_argcount + code.co_kwonlyargcount:
            return ()
        candidates = self._noted.get(code, [])
        if not candidates and not any(code in each.co_consts for each in entered):
            candidates = self._noted[code] = functions_with(code)
        if len(candidates) > 1 and code.co_freevars:
            values = [frame.f_locals.get(name, MISSING) for name in code.co_freevars]
            candidates = [each for each in candidates if closes_over(each, values)] or candidates
        return candidates


def by_name(code: CodeType, content: dict[str, Any]) -> FunctionType | None:
    """Return the function of a file or class with this code, which decorators may have wrapped."""
    found: Any = content
    for name in code.co_qualname.split("."):
        inside = found if isinstance(found, dict) else getattr(found, "__dict__", None)
        found = inside.get(name) if isinstance(inside, Mapping) else None
        if found is None:
            return None
    for attribute in ("fget", "__func__", "func", "__wrapped__"):
        found = getattr(found, attribute, None) or found
    return found if isinstance(found, FunctionType) and found.__code__ is code else None


def functions_with(code: CodeType) -> list[FunctionType]:
    """Return all functions with this code, wherever they are: this takes 0.1 s."""
    return [thing for thing in all_objects() if type(thing) is FunctionType and thing.__code__ is code]


def closes_over(function: FunctionType, values: Sequence[Any]) -> bool:
    contents = ((*cell_contents(cell), MISSING)[0] for cell in function.__closure__ or ())
    return all(content is value for content, value in zip(contents, values, strict=True))


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Return the defaults of a function's arguments that can change, by name: the same dict for the same function."""
    given, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    defaults = dict(zip(names, given, strict=True)) | (function.__kwdefaults__ or {})
    kept = _kept_defaults.setdefault(function, {})
    kept.clear()
    kept |= {name: value for name, value in defaults.items() if not isinstance(value, CONSTANTS)}
    return kept
