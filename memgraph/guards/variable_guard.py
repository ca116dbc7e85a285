"""The variables outside of a module's attributes that its code reads, at one moment and later.

STEP = 3;  def forward(self, x): return x * STEP   ->   a walk whose tokens are equal as long as STEP is

Numbers, texts, and containers of these count by value, anything else by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import itemgetter
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from .module_attributes import CONSTANTS, AttributeWalk
from .outer_scopes import OuterScopes
from .outer_snapshot import DEPTH, LARGE, PlainWalk
from .variable_scope import OuterVariable, Scope
from .variables_read import variables_read

FUNCTIONS = (FunctionType, MethodType)
Place = tuple[int, str]  # that of an `OuterVariable`


class VariableGuard:
    """The variables that a module's code reads; a captured graph depends on the tokens of their `walk`.

    Attributes:
        changed: the names of those that made the latest walk.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.changed: tuple[str, ...] = ()
        self._code: Hashable = None
        self._scopes: tuple[Scope, ...] = ()
        self._ignored: dict[Place, Scope] = {}  # which keep what the ids stand for
        self._walk = VariableWalk((), {})

    def search(self) -> None:
        """Look for the variables again, if the module has other code than before."""
        parts = list(self.module.modules())
        functions = {
            value for part in parts for value in vars(part).values() if isinstance(value, FunctionType | MethodType)
        }
        code = frozenset(map(type, parts)), frozenset(functions)
        if code != self._code:
            self._code, self._scopes = code, variables_read(OuterScopes.of(parts))
            self._walk = VariableWalk(self._scopes, self._ignored)

    @property
    def walk(self) -> VariableWalk:
        """The walk over what the variables are now."""
        if self._walk.is_stale():
            before, self._walk = self._walk, VariableWalk(self._scopes, self._ignored)
            changed = self._walk.differing(before)
            self.changed = tuple(one.title for one in changed)
            if not all(map(_is_plain, changed)):  # what is there now may read other variables
                self._scopes = variables_read(OuterScopes.of(self.module.modules()))
                self._walk = VariableWalk(self._scopes, self._ignored)
        return self._walk

    def ignore_changes(self, before: VariableWalk) -> bool:
        """Leave out from now on what has changed since an earlier walk; return True if anything has."""
        changed = self.walk.differing(before)
        self._ignored |= {one.place: one.scope for one in changed}
        if changed:
            self._walk = VariableWalk(self._scopes, self._ignored)
        return bool(changed)


class VariableWalk(PlainWalk):
    """The tokens of the variables in some scopes, but those at `ignored` places."""

    def __init__(self, scopes: Iterable[Scope], ignored: Mapping[Place, object]) -> None:
        super().__init__()
        self.described: dict[OuterVariable, tuple[Hashable, ...]] = {}
        self._cells: list[CellType] = []
        self._mappings: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        for scope in scopes:
            content = scope.content()
            names = [name for name in sorted(content) if _counts(name, content[name], scope)]
            if names := [name for name in names if OuterVariable(scope, name).place not in ignored]:
                self._describe_scope(scope, names, content)
        self._check(self._identities)

    def _describe_new(self, thing: Any, depth: int) -> None:
        if isinstance(thing, dict) and len(thing) <= LARGE:  # of a class of its own, too
            AttributeWalk._describe_new(self, thing, depth)
        else:
            super()._describe_new(thing, depth)

    def differing(self, before: VariableWalk) -> tuple[OuterVariable, ...]:
        """Return the variables that have other values than in an earlier walk."""
        earlier = {one.place: tokens for one, tokens in before.described.items()}
        return tuple(one for one, tokens in self.described.items() if earlier.get(one.place, tokens) != tokens)

    def _describe_scope(self, scope: Scope, names: list[str], content: dict[str, Any]) -> None:
        owner = scope.owner
        self._keep(content.values())
        if isinstance(owner, CellType):
            self._cells.append(owner)
        else:
            get = itemgetter(*names, names[0])  # a tuple for one name, too
            self._mappings.append((get, owner if isinstance(owner, dict) else vars(owner)))
        for name in names:
            self.numbers.clear()  # so that no variable's description depends on others
            begin = len(self.tokens)
            self.tokens.append(name)
            if isinstance(owner, dict):
                self._describe_item(owner, name, DEPTH)
            else:
                self.describe(content[name], DEPTH)
            self.described[OuterVariable(scope, name)] = tuple(self.tokens[begin:])

    def _identities(self) -> object:
        """Return the identities of all variables, in one function, since every call of the module comes by."""
        cells = [id(cell.cell_contents) for cell in self._cells]
        return cells, [tuple(map(id, get(mapping))) for get, mapping in self._mappings]


def _is_plain(variable: OuterVariable) -> bool:
    return isinstance(variable.scope.content().get(variable.name), (*CONSTANTS, Tensor))


def _counts(name: str, value: Any, scope: Scope) -> bool:
    """Return True for what may change: in installed packages plain values alone."""
    if scope.is_installed:
        return type(value) in CONSTANTS or isinstance(value, Tensor)
    return not (name.startswith("__") and name.endswith("__")) and not isinstance(value, ModuleType)
