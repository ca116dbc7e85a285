"""The attributes of a module that its captured calls write, and the tensors in them that calls read.

    self.last = y.detach()                  nothing reads it: no fact of a call
    self.mean = 0.9 * self.mean + y.mean()  its tensor is one more argument of the call

Each capture adds what it has found. What calls read is described with their arguments, and all of it by no walk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from ..errors import CaptureError
from ..system.own_attributes import attributes_of
from ..tensors.pytree import CONSTANTS, Spec, flatten
from .containers import restore_container
from .read_objects import noting_modules
from .variable_scope import WHOLE


class Absent:
    """Stands for the value of an attribute that is not there."""


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
    """Tells which attributes a block has read before it wrote them, and which it wrote."""

    def __init__(self, attributes: Iterable[Attribute]) -> None:
        self.read = set[Attribute]()
        self._before = {each: each.value for each in attributes}
        self._known = {each.key: each for each in self._before}
        self._set = set[Attribute]()
        self._written: set[Attribute] | None = None  # once the block has ended

    def written(self) -> set[Attribute]:
        """Return the attributes that the block has written so far; those not read, whatever they had before."""
        if self._written is not None:
            return self._written
        return (self._set - self.read) | {each for each, value in self._before.items() if each.value is not value}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with noting_modules(self._note_read, self._note_write):
            try:
                yield
            finally:
                self._written = self.written()

    def _note_read(self, part: nn.Module, name: str) -> None:
        if name in WHOLE:
            self.read |= {each for each in self._before if each.part() is part and each not in self._set}
        elif (attribute := self._known.get((id(part), name))) is not None and attribute not in self._set:
            self.read.add(attribute)

    def _note_write(self, part: nn.Module, name: str) -> None:
        if (attribute := self._known.get((id(part), name))) is not None:
            self._set.add(attribute)

    def not_read(self) -> set[Attribute]:
        """Return those that the block has not read before it wrote them."""
        return self._before.keys() - self.read


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


def _filled(now: Any, value: Any) -> Any:
    """Return a container or an object with the items of another one; tensors and numbers become that value."""
    if type(now) is not type(value) or isinstance(now, (Tensor, *CONSTANTS)):
        return value
    if type(now) is tuple and len(now) == len(value):
        items = [*map(_filled, now, value)]
        return now if all(map(is_, items, now)) else tuple(items)
    if not isinstance(now, dict | list | deque):
        inside = attributes_of(now)
        if inside is None or isinstance(now, nn.Module | type):
            return value
        _filled(inside, vars(value))
    elif isinstance(now, dict):
        restore_container(now, {key: _filled(now.get(key), item) for key, item in value.items()})
    else:
        old = [*now, *[None] * len(value)]
        restore_container(now, type(now)(_filled(*pair) for pair in zip(old, value, strict=False)))
    return now
