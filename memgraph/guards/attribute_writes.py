"""What a forward writes to attributes, item by item.

    self.seen[9] = 0   ->   AttributeWrite(owner=self.seen, key=9, value=0)

A captured step runs no Python, so it writes nothing. What eager would have written is put in place while another kind
of call is captured, which may read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from .attribute_snapshot import RNN_CACHES, AttributeSnapshot
from .containers import restore_container
from .module_attributes import IGNORED, AttributeWalk

DELETED = object()  # stands for the value of an item that is gone
WHOLE = object()  # stands for the key of a list, set or deque
OF_TORCH = IGNORED | RNN_CACHES | {"_modules"}


@dataclass(frozen=True, eq=False)
class AttributeWrite:
    """A new value of an item of a dict, an attribute being one of its module's; or all items of another container.

    Attributes:
        owner: returns the container; None if its module is gone.
        where: the attributes that the same forward has changed.
    """

    owner: Callable[[], Any]
    key: Any
    value: Any
    where: str = ""

    @cached_property
    def token(self) -> Hashable:
        """A key that is equal for equal values."""
        walk = AttributeWalk()
        walk.describe(self.value, 1)
        return walk.key

    def apply(self) -> None:
        """Write the value."""
        owner = self.owner()
        if owner is None:
            return
        if self.key is WHOLE:
            restore_container(owner, self.value)
        elif self.value is DELETED:
            owner.pop(self.key, None)
        else:
            owner[self.key] = self.value


def attribute_writes(before: AttributeSnapshot, after: AttributeSnapshot) -> tuple[AttributeWrite, ...]:
    """Return what a forward wrote between two snapshots; tensors are left out, which no capture lets it store."""
    if before.changed(after) is None or len(before.modules) != len(after.modules):
        return ()
    where, found = ", ".join(before.changes(after)), list[AttributeWrite]()
    of_torch: set[int] = set()
    for (_, module), old, new in zip(after.modules, before.attributes, after.attributes, strict=True):
        of_torch |= {id(new.get(name)) for name in OF_TORCH}
        names = [name for name in {**old, **new} if name not in OF_TORCH]
        found += _item_writes(_attributes_of(module), old, new, names, where)
    for container, new_items in after.copies.values():
        _, old_items = before.copies.get(id(container), (None, None))
        if old_items is not None and id(container) not in of_torch:
            found += _container_writes(container, old_items, new_items, where)
    return tuple(found)


@contextmanager
def written(writes: Sequence[AttributeWrite]) -> Iterator[None]:
    """Put writes in place for the block."""
    owners = [owner for write in writes if (owner := write.owner()) is not None]
    before = {id(owner): (owner, owner.copy()) for owner in owners}
    try:
        for write in writes:
            write.apply()
        yield
    finally:
        for owner, items in before.values():
            restore_container(owner, items)


def _attributes_of(module: nn.Module) -> Callable[[], Any]:
    """Return a function that returns a module's attributes, and keeps no parameters of it alive."""
    reference = weakref.ref(module)
    return lambda: None if (alive := reference()) is None else vars(alive)


def _container_writes(container: Any, old: Any, new: Any, where: str) -> list[AttributeWrite]:
    if isinstance(container, dict):
        return _item_writes(lambda: container, old, new, {**old, **new}, where)
    return [] if old == new else [AttributeWrite(lambda: container, WHOLE, new, where)]


def _item_writes(
    owner: Callable[[], Any], old: dict[Any, Any], new: dict[Any, Any], keys: Iterable[Any], where: str
) -> list[AttributeWrite]:  # fmt: skip
    changed = [key for key in keys if old.get(key, DELETED) is not new.get(key, DELETED)]
    writes = [AttributeWrite(owner, key, new.get(key, DELETED), where) for key in changed]
    return [write for write in writes if not isinstance(write.value, Tensor)]
