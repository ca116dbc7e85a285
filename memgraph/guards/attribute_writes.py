"""The writes of a forward to attributes, item by item.

    self.seen[9] = 0   ->   AttributeWrite(owner=self.seen, key=9, value=0)

A captured step runs no Python, so it writes nothing. What eager would have written is put in place while another kind
of call is captured, which may read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..tensors.traced_size import Number, SizeNeededError
from .attribute_snapshot import PENDING, RNN_CACHES, AttributeSnapshot
from .containers import has_same_items, restore_container
from .module_attributes import CONSTANTS, IGNORED, AttributeWalk

DELETED = object()  # stands for the value of an item that is gone
WHOLE = object()  # stands for the key of a list, set or deque
# Hooks that forward registers are written: it may note in an attribute that they are there.
OF_TORCH = {name for name in IGNORED if "hooks" not in name} | RNN_CACHES | {"_modules"}


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

    @property
    def place(self) -> tuple[int, Any]:
        """The container, by its id, and the key."""
        return id(self.owner()), self.key

    @cached_property
    def token(self) -> Hashable:
        """A key that is equal for equal values."""
        walk = AttributeWalk()
        walk.describe(self.value, 1)
        return walk.group

    def found(self) -> Any:
        """Return what is there now, the items of another container than a dict as a copy."""
        owner = self.owner()
        return DELETED if owner is None else owner.copy() if self.key is WHOLE else owner.get(self.key, DELETED)

    def finds(self, earlier: Any) -> bool:
        """Return True if the same is there as was found earlier."""
        now = self.found()
        return has_same_items(now, earlier) if self.key is WHOLE and DELETED not in (now, earlier) else now is earlier

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


@dataclass(frozen=True, eq=False)
class AttributeWrites:
    """All that a captured forward writes.

    Attributes:
        general: those of the capture with symbols for lengths that this one was made of.
    """

    items: tuple[AttributeWrite, ...] = ()
    general: AttributeWrites | None = None

    def at(self, number: Number) -> AttributeWrites:
        """Return the writes with numbers in the place of symbols."""
        return AttributeWrites(tuple(replace(item, value=_at(item.value, number)) for item in self.items), self)

    def require_plain_values(self) -> None:
        """
        Raises:
            SizeNeededError: there may be symbols that `at` does not find.
        """
        leaves = [leaf for item in self.items for leaf in pytree.tree_leaves(item.value)]
        is_plain = all(type(leaf) in (*CONSTANTS, torch.SymInt, torch.Size) for leaf in leaves)
        if not is_plain or any(item.key is WHOLE for item in self.items):
            raise SizeNeededError(f"forward may keep one in {self.items[0].where}")


def attribute_writes(before: AttributeSnapshot, after: AttributeSnapshot) -> AttributeWrites:
    """Return what a forward wrote between two snapshots; tensors are left out, which no capture lets it store."""
    if before.changed(after) is None or len(before.modules) != len(after.modules):
        return AttributeWrites()
    where, found = ", ".join(before.changes(after)), list[AttributeWrite]()
    of_torch: set[int] = set()
    for (_, module), old, new in zip(after.modules, before.attributes, after.attributes, strict=True):
        of_torch |= {id(new.get(name)) for name in OF_TORCH}
        parts = {name for group in OF_TORCH for name in (new.get(group) or ()) if isinstance(new[group], dict)}
        names = [name for name in {**old, **new} if name not in OF_TORCH and name not in parts]
        found += _item_writes(_attributes_of(module), old, new, names, where)
    for container, new_items in after.copies.values():
        _, old_items = before.copies.get(id(container), (None, None))
        if old_items is not None and id(container) not in of_torch:
            found += _container_writes(container, old_items, new_items, where)
    return AttributeWrites(tuple(found))


@contextmanager
def written(writes: Sequence[AttributeWrite]) -> Iterator[None]:
    """Put writes in place for the block; forward may change numbers among them."""
    owners = [owner for write in writes if (owner := write.owner()) is not None]
    before = {id(owner): (owner, owner.copy()) for owner in owners}
    reset = PENDING.set({write.place for write in writes})
    try:
        for write in writes:
            write.apply()
        yield
    finally:
        PENDING.reset(reset)
        for owner, items in before.values():
            restore_container(owner, items)


def _at(value: Any, number: Number) -> Any:
    def leaf(size: Any) -> Any:
        return torch.Size(map(number, size)) if isinstance(size, torch.Size) else number(size)

    return pytree.tree_map_only((torch.SymInt, torch.Size), leaf, value)


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
