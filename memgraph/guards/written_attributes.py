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
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from ..errors import CaptureError
from ..tensors.pytree import Spec, flatten
from .containers import restore_container


class Absent:
    """Stands for the value of an attribute that is not there."""


class Unwritten:
    """Stands for the value of an attribute that nothing reads, until a trace writes it."""


@dataclass(frozen=True)
class Attribute:
    """An attribute of a submodule, which it does not keep alive."""

    part: ref[nn.Module]
    name: str

    @property
    def value(self) -> Any:
        part = self.part()
        return Absent if part is None else vars(part).get(self.name, Absent)

    @property
    def key(self) -> tuple[int, str]:
        """The submodule, by its id, and the name."""
        return id(self.part()), self.name

    def fill(self, value: Any) -> None:
        """Set the attribute, the items of containers in place."""
        part = self.part()
        if part is not None and value is not Absent:
            vars(part)[self.name] = _filled(self.value, value)


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


@contextmanager
def finding_unread_writes(module: nn.Module, found: set[Attribute]) -> Iterator[None]:
    """Find which of the attributes that nothing reads a block writes, be it what is there already."""
    before = [(each, each.value) for each in written_attributes(module).unread if each.value is not Absent]
    for attribute, _ in before:
        attribute.fill(Unwritten)
    try:
        yield
    finally:
        for attribute, value in before:
            if attribute.value is Unwritten:
                attribute.fill(value)
            else:
                found.add(attribute)


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
    """Return a container with the items of another one; others become that value."""
    if type(now) is not type(value) or not isinstance(now, dict | list | deque):
        return value
    if isinstance(now, dict):
        restore_container(now, {key: _filled(now.get(key), item) for key, item in value.items()})
    else:
        old = [*now, *[None] * len(value)]
        restore_container(now, type(now)(_filled(*pair) for pair in zip(old, value, strict=False)))
    return now
