"""Find the variables outside of a module's attributes that its forward may refer to.

    class Layer(nn.Module):
        calls = 0                                ->   Layer.calls
        def forward(self, x): COUNTS["n"] += 1   ->   model.COUNTS

They are class attributes, globals, closures, defaults, and attributes of functions and of objects that code names. The
search begins at the classes of submodules, and goes on to each function, class, object and file that some code names.
It does not enter torch, Python's library, nor installed packages that no submodule comes from.
"""

from __future__ import annotations

import builtins
import dis
import functools
import os
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

import passes

from ..system.frames import MEMGRAPH, TORCH
from .variable_scope import OuterVariable, Scope, cell_contents, mentions

MANY = 5_000  # functions, classes and objects that are entered
ENTRIES = ("forward", "backward", "setup_context")  # methods that torch calls
KNOWN = frozenset({*sys.stdlib_module_names, "torch", "memgraph", "passes"})
STANDARD = str(Path(dis.__file__).parent) + os.sep
PASSES = str(Path(passes.__file__).parent) + os.sep
NAMESPACES = (SimpleNamespace, Namespace)
STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


@dataclass(frozen=True, eq=False)
class OuterScopes:
    """The scopes that the code of some submodules refers to, and its functions.

    Attributes:
        held: the ids of those functions that an attribute, a closure, a partial or a class holds.
    """

    scopes: tuple[Scope, ...] = ()
    functions: tuple[FunctionType, ...] = ()
    held: frozenset[int] = frozenset()

    @classmethod
    def of(cls, parts: Iterable[nn.Module]) -> OuterScopes:
        """Return those of the classes of submodules, and of the functions and objects among their attributes."""
        search = _Search(tuple(parts))
        return cls(tuple(search.scopes.values()), tuple(search.functions), frozenset(search.held))

    def only(self, variables: Iterable[OuterVariable]) -> OuterScopes:
        """Return the scopes of some variables."""
        return OuterScopes(tuple(dict.fromkeys(one.scope for one in variables)))

    def have(self, variable: OuterVariable) -> bool:
        """Return True if the code refers to a variable, which another search may have found."""
        return any(one.owner is variable.scope.owner and variable.name in one.values() for one in self.scopes)

    def line(self, variable: OuterVariable) -> str:
        """Return the line that assigns to a variable, or else names it, as `path:line in function`; empty without."""
        users = [function for function in self.functions if function.__globals__ is variable.scope.owner]
        places = [one for function in users or self.functions for one in mentions(function.__code__, variable.name)]
        return max(places).place if places else ""


NO_SCOPES = OuterScopes()


def paths_of_readers(modules: Sequence[tuple[str, nn.Module]], variable: OuterVariable) -> list[str]:
    """Return the paths of the submodules whose code refers to a variable."""
    kinds: dict[type, list[nn.Module]] = {}
    for _, part in modules:
        kinds.setdefault(type(part), []).append(part)
    reading = {kind for kind, parts in kinds.items() if OuterScopes.of(parts).have(variable)}
    return [path for path, part in modules if type(part) in reading]


class _Search:
    """The scopes and functions that were found, and those things that wait to be entered."""

    def __init__(self, parts: tuple[nn.Module, ...]) -> None:
        self.scopes: dict[int, Scope] = {}  # by the id of what has the variables
        self.functions: list[FunctionType] = []
        self.held = set[int]()
        self._mentioned = set(ENTRIES)  # names in code
        self._methods: dict[str, list[Any]] = {}  # by name, as long as no code mentions them
        self._waiting = deque[tuple[str, Any]]()  # with their names
        kinds = tuple(dict.fromkeys(base for part in parts for base in type(part).__mro__))
        self._packages = set(map(_package, kinds)) - KNOWN
        self._wait(kinds)
        values = (value for part in parts for value in vars(part).values())
        self._wait(value if _is_code(value) else type(value) for value in values)
        seen = set[int]()
        while self._waiting and len(seen) < MANY:
            title, thing = self._waiting.popleft()
            if id(thing) not in seen:
                seen.add(id(thing))
                self._enter(title, thing)

    def _wait(self, things: Iterable[Any], title: str = "") -> None:
        """Enter things later that something other than a global's name refers to."""
        for thing in things:
            self.held.add(id(thing))
            self._waiting.append((title, thing))

    def _enter(self, title: str, thing: Any) -> None:
        if isinstance(thing, functools.partial):
            self._wait((thing.func, *thing.args, *thing.keywords.values()))
        elif isinstance(thing, MethodType):
            self._wait([thing.__func__])
            if not isinstance(thing.__self__, nn.Module):
                self._wait([thing.__self__], type(thing.__self__).__qualname__)
        elif isinstance(thing, FunctionType):
            if self._is_open(thing):
                self._enter_function(thing)
        elif isinstance(thing, type):
            if self._is_open(thing):
                self._enter_class(thing)
        elif self._is_open(type(thing)) and isinstance(getattr(thing, "__dict__", None), dict):
            self._add(type(thing), f"{title}.{{}}", vars(thing))
            self._waiting.append(("", type(thing)))
            if type(thing) in NAMESPACES or not _is_installed(_package(type(thing))):
                inner = (
                    (name, value) for name, value in vars(thing).items() if not isinstance(value, Tensor | nn.Module)
                )
                self._waiting.extend((f"{title}.{name}", value) for name, value in inner if hasattr(value, "__dict__"))

    def _is_open(self, thing: Any) -> bool:
        package = _package(thing)
        return package in self._packages or thing in NAMESPACES or not _is_installed(package)

    def _enter_class(self, kind: type) -> None:
        """Add its attributes, and those of its methods that some code mentions; its bases come later."""
        self._add(kind, f"{kind.__qualname__}.{{}}", kind)
        self._wait(kind.__bases__)
        for name, value in vars(kind).items():
            methods = list(_functions_of(value))
            if name in self._mentioned or (name.startswith("__") and not issubclass(kind, nn.Module)):
                self._wait(methods)
            else:
                self._methods.setdefault(name, []).extend(methods)

    def _enter_function(self, function: FunctionType) -> None:
        self.functions.append(function)
        title = function.__qualname__
        names, assigns_globals = names_in(function.__code__)
        for name in (names - self._mentioned) & self._methods.keys():
            self._wait(self._methods.pop(name))
        self._mentioned |= names
        self._enter_names(function, function.__module__, function.__globals__, names, assigns_globals)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            label = f"the variable {name} that {title} closes over"
            self._add(function, label, cell, {name})
            self._wait(cell_contents(cell), label)
        if defaults := _defaults(function):
            self.scopes[id(function.__code__)] = Scope(f"the default of {{}} in {title}", defaults, set(defaults))
        self._add(function, f"{title}.{{}}", vars(function))
        self._wait(value for value in vars(function).values() if _is_code(value))

    def _enter_names(self, of: Any, title: str, content: dict[str, Any], names: set[str], assigns: bool) -> None:
        """Add the globals with these names, those that the code `assigns` later included."""
        scope = self._add(of, f"{title}.{{}}", content, set())
        known = scope.names if scope.names is not None else set(content)
        new = (names if assigns else names & content.keys()) - known
        known.update(new)
        for name in new & content.keys():
            value = content[name]
            if not isinstance(value, ModuleType):
                self._waiting.append((f"{title}.{name}", value))
            elif self._is_open(value):
                self._enter_names(value, value.__name__, vars(value), names, False)

    def _add(
        self, of: Any, title: str, owner: dict[str, Any] | type | CellType, names: set[str] | None = None
    ) -> Scope:  # fmt: skip
        return self.scopes.setdefault(id(owner), Scope(title, owner, names, _is_installed(_package(of))))


def _package(thing: Any) -> str:
    """Return the top-level package of a class, a function or a module; empty in a namespace without a name."""
    name = thing.__name__ if isinstance(thing, ModuleType) else thing.__module__
    is_made = isinstance(thing, FunctionType) or (isinstance(thing, type) and not hasattr(builtins, thing.__name__))
    return "" if is_made and name in (None, "builtins") else str(name or "builtins").partition(".")[0]


@functools.cache
def _is_installed(package: str) -> bool:
    """Return True for torch, Python's library, this package, and what a package manager has installed."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if package in KNOWN and (not file or file.startswith((STANDARD, TORCH, MEMGRAPH, PASSES))):
        return True  # a file of the user's may have the same name
    return "site-packages" in file or "dist-packages" in file


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | functools.partial)


def _functions_of(value: Any) -> Iterator[Any]:
    """Yield the functions of an attribute of a class."""
    if isinstance(value, property):
        yield from (function for function in (value.fget, value.fset) if function is not None)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, functools.cached_property | functools.partialmethod):
        yield value.func
    elif _is_code(value):
        yield value


def _defaults(function: FunctionType) -> dict[str, Any]:
    """Return the defaults of a function's arguments that can change, by name."""
    given, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    defaults = dict(zip(names, given, strict=True)) | (function.__kwdefaults__ or {})
    return {name: value for name, value in defaults.items() if isinstance(value, dict | list | set | deque)}


@functools.lru_cache(20_000)
def names_in(code: CodeType) -> tuple[set[str], bool]:
    """Return the names in a function's code, inner functions included, and whether it assigns to globals."""
    names, assigns = set(code.co_names), STORE_GLOBAL in code.co_code[::2]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, inner_assigns = names_in(inner)
            names, assigns = names | more, assigns or inner_assigns
    return names, assigns
