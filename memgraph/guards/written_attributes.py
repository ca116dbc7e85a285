"""The attributes of a module that its captured calls write, and the tensors in them that calls read.

    self.last = y.detach()                  nothing reads it: no fact of a call
    self.mean = 0.9 * self.mean + y.mean()  its tensor is one more argument of the call

Each capture adds what it has found. What calls read is described with their arguments, and all of it by no walk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from ..errors import CaptureError
from ..tensors.pytree import CONSTANTS, Spec, flatten
from .containers import restore_container
from .variable_scope import overridden
from .what_ran import WhatRan


class Absent:
    """Stands for the value of an attribute that is not there."""


class Unwritten:
    """Stands for the value of an attribute that no code takes, until a trace writes it."""


@dataclass(frozen=True)
class Attribute:
    """An attribute of a submodule, which it does not keep alive."""

    part: ref[nn.Module]
    name: str

    @property
    def items(self) -> dict[str, Any]:
        """All attributes of the submodule."""
        return {} if (part := self.part()) is None else vars(part)

    @property
    def value(self) -> Any:
        return self.items.get(self.name, Absent)

    @property
    def key(self) -> tuple[int, str]:
        """The submodule, by its id, and the name."""
        return id(self.part()), self.name

    def clear(self) -> None:
        """Remove the attribute."""
        self.items.pop(self.name, None)

    def fill(self, value: Any) -> None:
        """Set the attribute, the items of containers in place."""
        if value is not Absent:
            self.items[self.name] = _filled(self.value, value)


class HeldNeeded(Exception):
    """No error: a call has more arguments than was known, and is traced once more."""


class WrittenAttributes:
    """The attributes that the captured calls of one module write.

    Attributes:
        held: the tensors in these are arguments of a call.
        unread: no code that ran reads these.
        keys: of all; no walk describes them.
    """

    def __init__(self) -> None:
        self.held: list[Attribute] = []
        self.unread = set[Attribute]()
        self.keys: frozenset[tuple[int, str]] = frozenset()

    def note(self, held: Iterable[Attribute], unread: Iterable[Attribute]) -> bool:
        """Add attributes; return True if any is held that was not."""
        new = [each for each in dict.fromkeys(held) if each not in self.held]
        self.held += new
        self.unread = (self.unread | {*unread}) - {*self.held}
        if (keys := frozenset(each.key for each in (*self.held, *self.unread))) != self.keys:
            self.keys = keys
        return bool(new)


_of_modules: WeakKeyDictionary[nn.Module, WrittenAttributes] = WeakKeyDictionary()


def written_attributes(module: nn.Module) -> WrittenAttributes:
    """Return those of a module, empty before its first capture."""
    found = _of_modules.get(module)
    return _of_modules.setdefault(module, WrittenAttributes()) if found is None else found


class AttributeWatch:
    """Hides attributes for a block, and tells which of these it has read before it wrote them, and which it wrote.

    Where a class has the name as well, or finds attributes in its own way, it counts as read if code that `ran` takes
    the name, and a value stands for it if none had done so before. Code that computes names reads all.

    Attributes:
        is_blind: such code has run, and some were hidden from it.
    """

    def __init__(self, attributes: Iterable[Attribute], ran: WhatRan) -> None:
        self.is_blind = False
        self.read = set[Attribute]()
        self._ran = ran
        self._attributes = [*dict.fromkeys(attributes)]
        self._hidden: dict[tuple[int, str], tuple[Attribute, Any]] = {}
        self._shown: list[tuple[Attribute, Any]] = []
        self._replaced: list[tuple[Attribute, Any]] = []
        self._written: set[Attribute] | None = None  # once the block has ended

    def written(self) -> set[Attribute]:
        """Return the attributes that the block has written so far, be it what they had before."""
        if self._written is not None:
            return self._written
        found = {each for each, value in self._shown if each.value is not value}
        found |= {each for each, _ in self._replaced if each.value is not Unwritten}
        return found | {each for each, _ in self._hidden.values() if each.value is not Absent}

    @contextmanager
    def watching(self) -> Iterator[None]:
        plain: Any = nn.Module.__getattr__

        def find(part: nn.Module, name: str) -> Any:
            if (found := self._hidden.pop((id(part), name), None)) is None:
                return plain(part, name)
            attribute, value = found
            self.read.add(attribute)
            attribute.fill(value)
            return plain(part, name) if value is Absent else value

        if self._ran.takes_any:
            self.read |= {*self._attributes}
            self._attributes = []
        orders = {each.part: (each.items, list(each.items)) for each in self._attributes}
        for attribute in self._attributes:
            value = attribute.value
            if can_hide(attribute):
                self._hidden[attribute.key] = attribute, value
                attribute.clear()
            elif value is Absent:
                self.read.add(attribute)
            elif self._takes(attribute):
                self._shown.append((attribute, value))
            else:
                self._replaced.append((attribute, value))
                attribute.fill(Unwritten)
        try:
            with mock.patch.object(nn.Module, "__getattr__", find) if self._hidden else nullcontext():
                yield
        finally:
            written = self.written()
            for attribute, value in (*self._replaced, *self._hidden.values()):
                if attribute not in written:
                    attribute.fill(value)
            self.read |= {each for each, _ in (*self._shown, *self._replaced) if self._takes(each)}
            for items, names in orders.values():
                _put_in_order(items, names)
            self.is_blind = self._ran.takes_any and bool(self._hidden or self._replaced)
            self._written = written

    def _takes(self, attribute: Attribute) -> bool:
        return self._ran.takes(type(attribute.part()), attribute.name)

    def not_read(self) -> set[Attribute]:
        """Return those that the block has not read before it wrote them."""
        return {*self._attributes} - self.read


def can_hide(attribute: Attribute) -> bool:
    """Return True if an attribute that is gone is asked for in a way that can be watched."""
    kind: Any = type(attribute.part())
    has_own = not overridden(kind).isdisjoint(("__getattr__", "__getattribute__"))
    return not has_own and not any(attribute.name in vars(base) for base in kind.__mro__)


def call_leaves(args: Sequence[Any], kwargs: dict[str, Any], held: Sequence[Attribute]) -> tuple[list[Any], Spec]:
    """Return the leaves of a call and its structure; behind the arguments come the attributes that are held.

    Raises:
        CaptureError: one of these has parameters.
    """
    if not held:
        return flatten((args, kwargs))
    for attribute in held:
        if any(isinstance(leaf, nn.Parameter) for leaf in flatten(attribute.value)[0]):
            raise CaptureError(
                f"forward stores a tensor in {attribute.name}, which has parameters or modules as well: keep these "
                "in another attribute"
            )
    return flatten((args, kwargs, *(each.value for each in held)))


def _put_in_order(items: dict[str, Any], names: Iterable[str]) -> None:
    """Let items be in the order of these names, and others behind them."""
    if list(items)[: len(order := [name for name in names if name in items])] != order:
        restore_container(items, {name: items[name] for name in (*order, *items)})


def _filled(now: Any, value: Any) -> Any:
    """Return a container or an object with the items of another one; tensors and numbers become that value."""
    if type(now) is not type(value) or isinstance(now, (Tensor, *CONSTANTS)):
        return value
    if type(now) is tuple and len(now) == len(value):
        items = [*map(_filled, now, value)]
        return now if all(map(is_, items, now)) else tuple(items)
    if not isinstance(now, dict | list | deque):
        inside = getattr(now, "__dict__", None)
        if not isinstance(inside, dict) or isinstance(now, nn.Module | type):
            return value
        _filled(inside, vars(value))
    elif isinstance(now, dict):
        restore_container(now, {key: _filled(now.get(key), item) for key, item in value.items()})
    else:
        old = [*now, *[None] * len(value)]
        restore_container(now, type(now)(_filled(*pair) for pair in zip(old, value, strict=False)))
    return now
