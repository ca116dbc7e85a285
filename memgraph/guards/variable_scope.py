"""A place outside of a module's attributes that holds variables, and the lines of code that name one.

COUNTS["n"] += 1                    ->   the globals of model.py: {"COUNTS": {"n": 1}}
type(self).calls += 1               ->   the class Layer: {"calls": 1}
mentions(forward.__code__, "calls")   ->   (True, 12, "model.py:12 in forward")
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

# What reads all attributes of a thing.
WHOLE = ("__dict__", "__dir__", "__getstate__", "__reduce_ex__", "__reduce__", "__copy__", "__deepcopy__")
CLOSED = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, functools.partial, nn.Module)


@dataclass(frozen=True, eq=False)
class Scope:
    """The globals of a file, a class, the attributes of an object, or a cell of a closure.

    Attributes:
        title: a format for the name of a variable.
        names: others are left out; None for all.
        is_installed: it belongs to a package that a package manager has installed.
    """

    title: str
    owner: dict[str, Any] | type | CellType
    names: set[str] | None = None
    is_installed: bool = False

    def without(self, names: Set[str]) -> Scope:
        """Return the place without the variables of these names; one of all variables stays as it is."""
        return self if self.names is None else replace(self, names=self.names - names)

    def values(self) -> dict[str, Any]:
        """Return its variables, but functions, classes and modules."""
        return {name: value for name, value in self.content().items() if not _is_closed(name, value)}

    def content(self) -> dict[str, Any]:
        """Return all that its names stand for."""
        if isinstance(self.owner, CellType):
            content: Mapping[str, Any] = dict(zip(self.names or (), cell_contents(self.owner), strict=False))
        else:
            content = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        names = content.keys() if self.names is None else self.names & content.keys()
        return {name: content[name] for name in names}

    def write(self, name: str, value: Any) -> None:
        """Give a variable a value."""
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict):
            self.owner[name] = value
        else:
            setattr(self.owner, name, value)

    def delete(self, name: str) -> None:
        """Take a variable out."""
        if isinstance(self.owner, CellType):
            del self.owner.cell_contents
        elif isinstance(self.owner, dict):
            del self.owner[name]
        else:
            delattr(self.owner, name)


class OuterVariable(NamedTuple):
    """One variable of a scope."""

    scope: Scope
    name: str

    @property
    def title(self) -> str:
        return self.scope.title.format(self.name)

    @property
    def place(self) -> tuple[int, str]:
        """The id of the owner, and the name: the same in scopes that were found at other times."""
        return id(self.scope.owner), self.name


class Whole(NamedTuple):
    """A class or an object whose attributes count once some code names them.

    Attributes:
        inherited: names of its bases, and of its class: an attribute that it gets may hide theirs.
    """

    title: str
    owner: Any
    is_installed: bool
    depth: int
    inherited: frozenset[str]


class Mention(NamedTuple):
    """A place in code that names a variable: whether it assigns to it, minus the line, and `path:line in function`."""

    assigns: bool
    before: int
    place: str


def mentions(code: CodeType, name: str) -> Iterator[Mention]:
    """Yield the places in a function that name a variable, those of inner functions included."""
    if name in (*code.co_names, *code.co_freevars, *code.co_varnames):
        for step in dis.get_instructions(code):
            line = step.positions.lineno if step.positions is not None else None
            if step.argval == name and line is not None:
                place = f"{code.co_filename}:{line} in {code.co_name}"
                yield Mention(step.opname.startswith("STORE"), -line, place)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from mentions(inner, name)


def cell_contents(cell: CellType) -> tuple[Any, ...]:
    """Return what a cell holds: one thing, or nothing."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _is_closed(name: str, value: Any) -> bool:
    """Return True for code, and for what Python keeps in classes and files."""
    return (
        (str(name).startswith("__") and str(name).endswith("__"))
        or isinstance(value, CLOSED)
        or hasattr(type(value), "__get__")
    )


@dataclass(frozen=True)
class Names:
    """Attributes of submodules that a capture was the first to read; each a path and a name.

    Attributes:
        read: by this capture; None for all.
        named: the names of attributes of objects in these that count; None for all.
        known: by those before it.
    """

    read: frozenset[tuple[str, str]] | None
    named: frozenset[str] | None = None
    known: frozenset[tuple[str, str]] = frozenset()

    def has(self, path: str, kind: type, name: str) -> bool:
        """Return True for an attribute of a submodule, which is of this class."""
        # Of the latter nothing tells what is read; which modules there are is described once, and always.
        if name == "_modules" or "__getattribute__" in overridden(kind):
            return not self.known
        return not has_read(self.known, path, name) and (self.read is None or has_read(self.read, path, name))


def has_read(read: Set[tuple[Any, str]], part: str | int, name: str) -> bool:
    """Return True if an attribute is among those that were read, of submodules by their paths or their ids."""
    return (part, name) in read or any((part, whole) in read for whole in WHOLE)


@functools.lru_cache(4096)
def overridden(kind: type) -> frozenset[str]:
    """Return the names that classes between a class and `nn.Module` have."""
    return frozenset(name for base in kind.__mro__[: kind.__mro__.index(nn.Module)] for name in vars(base))


@dataclass(frozen=True, eq=False)
class Reads:
    """The places and functions on which a graph rests outside of attributes.

    Attributes:
        attributes: those of submodules that were read, or set to what they were, each the id of one and a name; None
            if that is not known.
        named: names of attributes that code which ran takes of objects; None if it computes some.
    """

    scopes: tuple[Scope, ...] = ()
    functions: tuple[FunctionType, ...] = ()
    attributes: frozenset[tuple[int, str]] | None = None
    named: frozenset[str] | None = None
