"""The variables outside of a module's attributes that its code reads.

    SCALE = 2.0
    def forward(self, x): return x * SCALE + args.bias   ->   model.SCALE, model.args.bias

A global is read by code that loads it, in its own file or from one that it has imported. Other variables are taken to
be read where some code mentions their name. That is too much for globals: a training loop in the same file may have
one for each batch, such as `loss`, while forward has attributes of that name.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from dataclasses import replace
from types import CellType, CodeType, ModuleType
from typing import Any

from .outer_scopes import OuterScopes, names_in
from .variable_scope import Scope

ATTRIBUTE_OPS = ("LOAD_ATTR", "LOAD_METHOD")


def variables_read(scopes: OuterScopes) -> tuple[Scope, ...]:
    """Return the scopes of what code refers to with the names that it reads."""
    mentioned = set[str]().union(*(names_in(function.__code__)[0] for function in scopes.functions))
    loaded: dict[int, set[str]] = {id(function.__globals__): set() for function in scopes.functions}
    for function in scopes.functions:
        for owner, name in _loads(function.__code__, function.__globals__):
            loaded.get(id(owner), set()).add(name)
    found = [(scope, loaded.get(id(scope.owner), mentioned)) for scope in scopes.scopes]
    return tuple(scope if isinstance(scope.owner, CellType) else replace(scope, names=names) for scope, names in found)


def _loads(code: CodeType, content: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the globals that code loads, and those of imported files, each with the dict that has it."""
    for first, *rest in _paths(code):
        owner, name = content, first
        yield owner, name
        for following in rest:
            if not isinstance(value := owner.get(name), ModuleType):
                break
            owner, name = vars(value), following
            yield owner, name


@functools.lru_cache(20_000)
def _paths(code: CodeType) -> frozenset[tuple[str, ...]]:
    """Return the globals that code loads, with the attributes that it takes of each at once: ("config", "SCALE")."""
    paths, path = set[tuple[str, ...]](), tuple[str, ...]()
    for step in dis.get_instructions(code):
        if step.opname in ATTRIBUTE_OPS and path:
            path = (*path, step.argval)
            continue
        paths.add(path)
        path = (step.argval,) if step.opname == "LOAD_GLOBAL" else ()
    inner = (_paths(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(paths - {()}).union(*inner)
