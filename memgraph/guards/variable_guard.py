"""The variables outside of a module's attributes that its code reads, at one moment and later.

STEP = 3;  def forward(self, x): return x * STEP   ->   a walk whose tokens are equal as long as STEP is

Numbers, texts, containers and objects in them count by value, anything else by identity.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from enum import Enum
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..system.own_attributes import attributes_of
from .checks import items_of
from .contents import NAMESPACES, STATES, IdentityKey, is_weak
from .module_attributes import CONSTANTS, AttributeWalk
from .module_proxy import ModuleProxy, all_submodules
from .outer_snapshot import DEPTH, LARGE, PlainWalk
from .packages import is_open
from .variable_scope import OuterVariable, Reads, Scope

Place = tuple[int, str]  # that of an `OuterVariable`
# These count in installed packages too: someone may have replaced one.
TOLD = (FunctionType, BuiltinFunctionType, type, staticmethod, classmethod, property, Enum)
NESTED = 2  # containers in a registry of a package


class VariableGuard:
    """The variables that captures of a module rest on, with a walk over those that each was the first to read.

    Attributes:
        latest: the walks over what the variables were when they were last asked for.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.latest: list[VariableWalk] = []
        self._known: dict[int, set[str]] = {}  # names, by the id of what has the variables
        self._whole = set[int]()  # objects all of whose attributes count
        self._functions = set[int]()
        self._ignored: dict[Place, Scope] = {}  # which keep what the ids stand for

    def grow(self, reads: Reads) -> bool:
        """Add what another capture rests on; return True if there is anything that was not known."""
        functions = tuple(each for each in reads.functions if id(each) not in self._functions)
        scopes = [scope.without(self._known.get(id(scope.owner), set())) for scope in reads.scopes]
        whole = {
            id(scope.owner): scope for scope in scopes if scope.names is None and id(scope.owner) not in self._whole
        }
        self._whole |= whole.keys()
        new = Reads((*(scope for scope in scopes if scope.names), *whole.values()), functions)
        if not new.scopes and not functions:
            return False
        self._functions |= set(map(id, functions))
        for scope in new.scopes:
            self._known.setdefault(id(scope.owner), set()).update(scope.names or ())
        self.latest.append(self._walk(new))
        return True

    def _walk(self, reads: Reads) -> VariableWalk:
        return VariableWalk(
            reads, self._ignored, self._whole | {id(vars(part)) for _, part in all_submodules(self.module)}
        )

    @property
    def walks(self) -> list[VariableWalk]:
        """The walks over what the variables are now."""
        for i, walk in enumerate(self.latest):
            if walk.is_stale():
                self.latest[i] = self._walk(walk.reads)
        return self.latest

    def ignore_changes(self, before: Sequence[VariableWalk]) -> bool:
        """Leave out from now on what has changed since earlier walks; return True if anything has."""
        pairs = zip(self.walks, before, strict=False)
        return any(now is not earlier and any(True for _ in now.differing(earlier)) for now, earlier in pairs)


class VariableWalk(PlainWalk):
    """The tokens of what a capture reads, but of the variables at `ignored` places.

    `known` are the attributes, by the ids of their dicts, of modules that other tokens describe.
    """

    max_depth = 16

    def __init__(self, reads: Reads, ignored: Mapping[Place, object], known: Set[int] = frozenset()) -> None:
        super().__init__(owned={})
        self.reads, self.known = reads, known
        self.described: dict[OuterVariable, tuple[Hashable, ...]] = {}
        self._cells: list[CellType] = []
        self._referents: list[Any] = []  # of the functions: code, defaults and more
        self._classes: list[type] = []
        self._of_classes = set[int]()  # their dicts
        self._names: dict[int, tuple[Any, dict[str, None]]] = {}  # by the id of what has the variables
        for scope in reads.scopes:
            self._describe_scope(scope, ignored)
        for function in reads.functions:
            self._labels.append((len(self.tokens), (None, f"the function {function.__qualname__}")))
            self.tokens += [IdentityKey(function), IdentityKey(function.__code__)]
            for defaults in (function.__defaults__, function.__kwdefaults__):
                self.numbers.clear()
                self._label = (None, f"the defaults of {function.__qualname__}")
                self.describe(defaults, DEPTH)
        for inside, names in self._names.values():
            self.checks.dicts.add(inside, items_of(names), self._is_of_object(inside))
        self._found, self._referents = [*self._variables()], gc.get_referents(*reads.functions)
        self.checks.add(self._are_same)

    def differing(self, before: VariableWalk) -> tuple[OuterVariable, ...]:
        """Return the variables that have other values than in an earlier walk."""
        earlier = {one.place: tokens for one, tokens in before.described.items()}
        return tuple(one for one, tokens in self.described.items() if earlier.get(one.place, tokens) != tokens)

    def _describe_new(self, thing: Any, depth: int) -> None:
        kind = type(thing)
        if issubclass(kind, nn.Module) and (issubclass(kind, ModuleProxy) or id(vars(thing)) in self.known):
            self.checks.keep([thing])
            self.tokens.append(IdentityKey(thing))
            return
        is_object = isinstance(thing, nn.Module) or (_is_small(thing) and self._is_inside(thing, depth))
        if kind in STATES or is_weak(thing) or is_object:
            AttributeWalk._describe_new(self, thing, depth)
        else:
            super()._describe_new(thing, depth)
            if is_open(kind) and not isinstance(thing, type):  # a class has another `__dict__` each time it is asked
                inside = attributes_of(thing)
                self.tokens += [IdentityKey(kind), inside if inside is None else IdentityKey(inside)]
                self.checks.keep([inside])
                self.checks.add(lambda: (type(thing), id(attributes_of(thing))))
                self._describe_slots(thing, depth)
            elif isinstance(thing, MethodType):  # attributes that are no slots have a scope of their own
                self._describe_slots(thing.__self__, depth)

    def _is_inside(self, thing: Any, depth: int) -> bool:
        """Return True for an object in a container, or a container of its own class; any other has its own scope."""
        is_inside = depth > DEPTH or isinstance(thing, dict | list | tuple) or attributes_of(thing) is None
        return is_inside and (type(thing) in NAMESPACES or is_open(type(thing)))

    def _describe_scope(self, scope: Scope, ignored: Mapping[Place, object]) -> None:
        owner, content = scope.owner, scope.content()
        counted = [name for name in sorted(content) if _counts(name, content[name], scope)]
        names = [name for name in counted if OuterVariable(scope, name).place not in ignored]
        self.checks.keep(content.values())
        tensors = [name for name in names if isinstance(content[name], Tensor)]  # which are not kept alive
        plain = [name for name in names if name not in tensors]
        if tensors:
            self.checks.add(lambda: [*map(id, map(scope.content().get, tensors))])
        if isinstance(owner, CellType):
            self._cells += [owner] * len(plain)
        else:
            inside = owner if isinstance(owner, dict) else gc.get_referents(vars(owner))[0]  # behind a view
            if isinstance(owner, type):
                self._of_classes.add(id(inside))
            self._names.setdefault(id(owner), (inside, {}))[1].update(dict.fromkeys(plain))
        if scope.names is None and isinstance(owner, dict):  # the order in which a loop finds them
            self.tokens.append(tuple(owner))
            self.checks.dicts.add(owner, tuple, self._is_of_object(owner))
        if isinstance(owner, type) and (content or not scope.is_installed):
            self.tokens += map(IdentityKey, owner.__mro__)
            self._classes += [] if owner in self._classes else [owner]
        for name in names:
            self.numbers.clear()  # so that no variable's description depends on others
            begin = len(self.tokens)
            variable = OuterVariable(scope, name)
            self._labels.append((begin, (None, variable.title)))
            self.tokens.append(name)
            if isinstance(owner, dict) and type(content[name]) in (int, float):
                self.in_dicts[len(self.tokens)] = owner, name
            self.describe(content[name], DEPTH)
            self.described[variable] = tuple(self.tokens[begin:])

    def _variables(self) -> Iterator[Any]:
        """Yield what cells hold, and the bases of classes; no tensors."""
        return chain((cell.cell_contents for cell in self._cells), (kind.__mro__ for kind in self._classes))

    def _is_of_object(self, inside: dict[str, Any]) -> bool:
        """Return False for the variables of a class or a file."""
        file = sys.modules.get(str(inside.get("__name__", "")))
        return id(inside) not in self._of_classes and (file is None or vars(file) is not inside)

    def _are_same(self) -> bool:
        """Return True if all variables and functions hold the same objects, and tell no audit hook of it."""
        referents = gc.get_referents(*self.reads.functions)
        if len(referents) != len(self._referents):
            return False
        return all(map(is_, self._variables(), self._found)) and all(map(is_, referents, self._referents))


def _is_small(thing: Any) -> bool:
    return not isinstance(thing, dict | list | tuple | set | frozenset | deque) or len(thing) <= LARGE


def _is_registry(value: Any, depth: int = 0) -> bool:
    """Return True for a container of plain values, functions, classes and such containers."""
    if not isinstance(value, dict | list | tuple | set | frozenset) or len(value) > LARGE or depth > NESTED:
        return False
    inside = value.values() if isinstance(value, dict) else value
    return all(isinstance(each, (*CONSTANTS, *TOLD)) or _is_registry(each, depth + 1) for each in inside)


def _counts(name: str, value: Any, scope: Scope) -> bool:
    """Return True for what may change: in installed packages plain values alone, and what someone may replace."""
    if scope.is_installed:
        is_plain = type(value) in (*CONSTANTS, *STATES) or isinstance(value, (Tensor, *TOLD)) or _is_registry(value)
        return is_plain or callable(value)
    is_pythons = str(name).startswith("__") and str(name).endswith("__") and not isinstance(value, FunctionType)
    return not is_pythons and not isinstance(value, ModuleType)
