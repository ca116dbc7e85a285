"""The variables outside of a module's attributes that its code reads.

    SCALE = 2.0
    def forward(self, x): return x * SCALE + args.bias   ->   model.SCALE, model.args.bias

A global is read by code that loads it, in its own file or from one that it has imported, and so are attributes of
objects there. Other variables are taken to be read where some code mentions their name. That is too much for globals: a
training loop in the same file may have one for each batch, such as `loss`, while forward has attributes of that name.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from .outer_scopes import ENTRIES, OuterScopes, names_in
from .variable_scope import Scope

ATTRIBUTE_OPS = ("LOAD_ATTR", "LOAD_METHOD")


def variables_read(scopes: OuterScopes) -> tuple[Scope, ...]:
    """Return the scopes of what code refers to with the names that it reads."""
    functions = _functions_that_may_run(scopes)
    mentioned = set(ENTRIES).union(*(names_in(function.__code__)[0] for function in functions))
    loaded: dict[int, set[str]] = {id(function.__globals__): set() for function in scopes.functions}
    whole = set[int]()  # of files and objects whose attributes are read otherwise than by the path of a global
    for function in functions:
        for path in _paths(function.__code__):
            for owner, name, value in _loads(path, function.__globals__):
                loaded.setdefault(id(owner), set()).add(name)
                if name not in owner and owner is not function.__globals__:  # a method or a property reads others
                    whole.add(id(owner))
                if name == path[-1] and hasattr(value, "__dict__"):
                    whole.add(id(vars(value)))
    found = list[Scope]()
    for scope in scopes.scopes:
        names = loaded.get(id(scope.owner), scope.names or mentioned)
        found.append(replace(scope, names=mentioned if id(scope.owner) in whole else names))
    return tuple(found)


def _functions_that_may_run(scopes: OuterScopes) -> list[FunctionType]:
    """Return functions without the globals that no code loads: an attribute of that name is mentioned somewhere."""
    named = {id(function) for function in scopes.functions if function.__globals__.get(function.__name__) is function}
    unsure = named - scopes.held
    found = [function for function in scopes.functions if id(function) not in unsure]
    for function in found:
        for path in _paths(function.__code__):
            for _, _, value in _loads(path, function.__globals__):
                if id(value) in unsure:
                    unsure.remove(id(value))
                    found.append(value)
    return found


def _loads(path: Sequence[str], content: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield what code takes of the globals, of files and of objects there: the dict that has it, its name, and it."""
    owner: Any = content
    for name in path:
        if not isinstance(owner, dict):
            return
        value = owner.get(name)
        yield owner, name, value
        owner = None if isinstance(value, type | FunctionType | nn.Module) else getattr(value, "__dict__", None)


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
