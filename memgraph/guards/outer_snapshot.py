"""The plain values outside of a module's attributes that its code refers to, before it runs and later.

    with before.watching(): model(x)
    before.changes(OuterSnapshot(before.ran))   ->   Layer.calls
    before.restore()

Numbers, texts, tensors, and containers of these. Other objects count by identity, and so do large containers.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from types import BuiltinMethodType, FrameType, FunctionType
from typing import Any

from torch import Tensor

from ..system.entered_code import watching_entries
from ..tensors.traced_number import STAND_INS
from .containers import items_of, restore_container
from .contents import STATES, IdentityKey, constant_key, is_array
from .module_attributes import CONSTANTS, AttributeWalk
from .read_objects import noting_attributes, noting_modules, noting_objects, noting_reads
from .variable_scope import OuterVariable, Scope
from .what_ran import WhatRan

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, tuple, set, frozenset, deque)
LARGE = 1_000  # entries; such a container counts by its length alone
Note = Callable[[Sequence[Scope], Sequence[FunctionType], FrameType], object]
DEPTH = 1  # where the walk begins, as that of an attribute


class OuterSnapshot:
    """The variables that what ran refers to, with copies of the containers in them.

    The tensors `inputs` of a call or its trace are compared by position: every trace has others.
    """

    def __init__(self, ran: WhatRan | None = None, inputs: Sequence[Tensor] = ()) -> None:
        self.ran = ran if ran is not None else WhatRan()
        self.values: dict[Scope, dict[str, Any]] = {}
        self.tokens: dict[OuterVariable, tuple[Hashable, ...]] = {}
        self.copies: list[tuple[Any, Any]] = []
        given = (enumerate(inputs), enumerate(self.ran.tensors))
        self._walk = PlainWalk({id(tensor): position for position, tensor in chain(*given)})
        self._describe([*self.ran.scopes, *self.ran.defaults])

    @contextmanager
    def watching(self, note: Note | None = None) -> Iterator[None]:
        """Add what a block refers to, as it is before the code runs that does so, and give it to `note`."""

        def enter(frame: FrameType) -> None:
            scopes, functions = self.ran.enter(frame)
            self._describe(scopes)
            if note is not None:
                note(scopes, functions, frame)

        def read(thing: Any, name: str) -> None:
            self._describe(self.ran.read(thing, name))

        with (
            _without_gc_callbacks(),
            watching_entries(enter),
            noting_modules(self.ran.read_attribute, self.ran.set_attribute),
            noting_objects(self.ran.kinds, self.ran.read_name),
            noting_reads(read),
            noting_attributes(read),
        ):
            yield

    def changes(self, later: OuterSnapshot) -> tuple[OuterVariable, ...]:
        """Return all variables that were added, removed or changed, of what was there for both."""
        both = self.values.keys() & later.values.keys()
        variables = dict.fromkeys((*later.tokens, *self.tokens))
        return tuple(
            one for one in variables if one.scope in both and self.tokens.get(one) != later.tokens.get(one)
        )  # fmt: skip

    def written(self) -> Iterator[tuple[Hashable, str]]:
        """Yield a key and a title of each place whose plain value is another now: variables, and entries of dicts."""
        titles = dict[int, str]()
        for scope, before in self.values.items():
            now = scope.values()
            titles |= {id(_content(value)): OuterVariable(scope, name).title for name, value in now.items()}
            for name in before.keys() & now.keys():
                if _is_other(before[name], now[name]) and not self.ran.is_of_hooks(OuterVariable(scope, name)):
                    yield (id(scope.owner), name), OuterVariable(scope, name).title
        for container, copy in self.copies:
            title = titles.get(id(container), "a variable")
            for key in copy.keys() & container.keys() if isinstance(container, dict) else ():
                if _is_other(copy[key], container[key]):
                    yield (id(container), key), f"{title}[{key!r}]"
            if isinstance(container, list | deque) and list(container) != list(copy):
                yield (id(container), None), title
        for variable, value in self._walk.contexts:
            if _is_other(value, variable.get(None)):
                yield id(variable), titles.get(id(variable), variable.name)

    def holds(self, variable: OuterVariable, kind: type[Tensor]) -> bool:
        """Return True if a variable holds a tensor of this kind."""
        return holds(self.tokens.get(variable), kind)

    def restore(self) -> None:
        """Put back what has changed, but for objects that were added: registries of a library."""
        for scope, before in self.values.items():
            now = scope.values()
            for name, old in before.items():
                if name not in now or now[name] is not old:
                    scope.write(name, old)
            for name in now.keys() - before.keys():
                if _is_plain(now[name]):
                    scope.delete(name)
        for container, copy in self.copies:
            old = {id(item) for _, item in items_of(copy)}
            if all(_is_plain(item) or id(item) in old for _, item in items_of(container)):
                restore_container(container, copy)
        for variable, value in self._walk.contexts:
            if variable.get(None) is not value:
                variable.set(value)

    def _describe(self, scopes: Sequence[Scope]) -> None:
        for scope in scopes:
            self.values[scope] = scope.values()
            for name, value in self.values[scope].items():
                self._walk.numbers.clear()  # so that no variable's description depends on others
                begin = len(self._walk.tokens)
                self._walk.describe(value, DEPTH)
                self.tokens[OuterVariable(scope, name)] = tuple(self._walk.tokens[begin:])
        new = self._walk.containers[len(self.copies) :]
        self.copies += [(container, container.copy()) for container in new]


@contextmanager
def _without_gc_callbacks() -> Iterator[None]:
    """Run no functions that libraries have given to the garbage collector: they run anywhere in forward."""
    callbacks = list(gc.callbacks)
    gc.callbacks.clear()
    try:
        yield
    finally:
        gc.callbacks[:0] = callbacks


def holds(tokens: object, kind: type | tuple[type, ...]) -> bool:
    """Return True if the description of a thing names an object of this kind."""
    described = tokens if isinstance(tokens, tuple) else ()
    return any(isinstance(token, IdentityKey) and isinstance(token.target(), kind) for token in described)


class PlainWalk(AttributeWalk):
    """Describes plain values and containers, and anything else by identity."""

    contexts: tuple[tuple[ContextVar[Any], Any], ...] = ()  # with the values that they have had

    def _describe_new(self, thing: Any, depth: int) -> None:
        if isinstance(thing, ContextVar):
            self.contexts = (*self.contexts, (thing, thing.get(None)))
        is_container = type(thing) in CONTAINERS
        plain = Tensor, functools.partial, functools.partialmethod, BuiltinMethodType
        is_plain = isinstance(thing, plain) or is_array(thing) or type(thing) in STATES
        if is_plain or (is_container and len(thing) <= LARGE):
            super()._describe_new(thing, depth)
        else:
            self.checks.keep([thing])
            self.tokens += [IdentityKey(thing), len(thing)] if is_container else [IdentityKey(thing)]


def _content(thing: Any) -> Any:
    """Return the dict of an object that has its content elsewhere, as `os.environ`."""
    return STATES[type(thing)](thing) if isinstance(thing, type(os.environ) | threading.local) else thing


def _is_other(before: Any, now: Any) -> bool:
    is_plain = type(now) in CONSTANTS or (isinstance(now, tuple) and all(type(each) in CONSTANTS for each in now))
    return before is not now and is_plain and constant_key(before) != constant_key(now)


def _is_plain(thing: Any) -> bool:
    return type(thing) in (*CONSTANTS, *CONTAINERS, *STAND_INS) or isinstance(thing, Tensor)
