"""The writes of a forward to attributes, item by item.

    self.seen[9] = 0          ->   AttributeWrite(owner=self.seen, key=9, value 0)
    self.last = y.detach()    ->   AttributeWrite(owner=vars(self), key="last", value the second output of the graph)
    self.calls += 1           ->   AttributeWrite(owner=vars(self), key="calls", value Formula(calls + 1))

A captured step runs no Python: each run is followed by the writes of its capture.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..system.own_attributes import attributes_of
from ..tensors.counted_number import CountedNumber, Formula
from ..tensors.expressions import variables
from ..tensors.pytree import CONSTANTS as LEAVES
from ..tensors.pytree import OPAQUE, Spec, flatten, unflatten
from ..tensors.traced_number import is_traced
from ..tensors.traced_size import SizeNeededError, with_arguments
from .attribute_snapshot import COUNTERS, RNN_CACHES, AttributeSnapshot, stored_tensor_error
from .containers import restore_container
from .contents import constant_key
from .module_attributes import IGNORED
from .owned_tensors import layout_of
from .written_attributes import Attribute

DELETED = object()  # stands for the value of an item that is gone
INSIDE = object()  # stands for `__dict__` in a route
DEPTH = 8  # of containers in an attribute
WHOLE = object()  # stands for the key of a list, set or deque
# Hooks that forward registers are written: it may note in an attribute that they are there.
OF_TORCH = {name for name in IGNORED if "hooks" not in name} | RNN_CACHES | {"_modules"}
OF_MODULES = frozenset(vars(nn.Module()))

Fill = Callable[[Any], Any]  # from a leaf of a value to what is written


@dataclass(frozen=True)
class Route:
    """The way from an attribute to a container in it: keys, or the name `__dict__` of an object; None to all attributes
    of its module."""

    attribute: Attribute
    keys: tuple[Any, ...] | None

    @property
    def end(self) -> Any:
        """The container that is there now; None if there is none."""
        if self.keys is None:
            return self.attribute.items
        found = self.attribute.value
        try:
            for key in self.keys:
                found = vars(found) if key is INSIDE else found[key]
        except (LookupError, TypeError):
            return None
        return found


def _keys_to(container: Any, value: Any, depth: int = 0) -> tuple[Any, ...] | None:
    """Return the keys that lead from a value to a container in it; None if there are none."""
    if value is container:
        return ()
    for key, item in _inside(value) if depth <= DEPTH and not isinstance(value, set) else ():
        if (rest := _keys_to(container, item, depth + 1)) is not None:
            return key, *rest
    return None


def with_shared(snapshot: AttributeSnapshot, attributes: Iterable[Attribute]) -> list[Attribute]:
    """Return attributes, and all others that lead to a container in one of them."""
    found = [*dict.fromkeys(attributes)]
    inside = (each for attribute in found for each in _containers(attribute.value))
    shared = {id(each): each for each in inside if not isinstance(each, Tensor)}
    for (_, module), own in zip(snapshot.modules, snapshot.attributes, strict=True) if shared else ():
        for name, value in own.items():
            attribute = Attribute(weakref.ref(module), name)
            is_new = name not in OF_TORCH and attribute not in found
            if is_new and any(id(each) in shared for each in _containers(value)):
                found.append(attribute)
    return found


def _containers(value: Any, depth: int = 0) -> list[Any]:
    """Return the containers in a value, and the attributes of objects, that lead to a tensor; and the tensor."""
    if isinstance(value, Tensor) or depth > DEPTH:
        return [value] if isinstance(value, Tensor) else []
    found = [each for _, item in _inside(value) for each in _containers(item, depth + 1)]
    return [value, *found] if found and isinstance(value, dict | list | set | deque) else found


def _inside(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a container, or the attributes of an object, with their keys; a set has no keys."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple | set | deque):
        return list(enumerate(value))
    if isinstance(value, type | Tensor | nn.Module | FunctionType | ModuleType):
        return []
    return [(INSIDE, own)] if (own := attributes_of(value)) is not None else []


@dataclass(frozen=True, eq=False)
class AttributeWrite:
    """A new value of an item of a dict, an attribute being one of its module's; or all items of another container.

    Attributes:
        owner: the way to the container.
        leaves: of the value.
        spec: its structure; None for an item that is gone.
        settles: a call that finds the like of this value writes the like again.
        where: its path.
        change: the item, and what it was before if these are numbers or texts.
        is_read: code that ran takes the attribute.
    """

    owner: Route
    key: Any
    leaves: tuple[Any, ...]
    spec: Spec | None
    settles: bool
    where: str
    change: str
    is_read: bool = True

    @property
    def attribute(self) -> Attribute:
        """The one that is written, or leads to the container."""
        return self.owner.attribute

    @property
    def holds_tensors(self) -> bool:
        """True if a tensor of the step is in the value, or a number read from one."""
        return any(map(_is_computed, self.leaves))

    @property
    def is_held(self) -> bool:
        """True if the next call reads a tensor that is written."""
        return self.is_read and self.holds_tensors

    @property
    def has_numbers(self) -> bool:
        """True if a number is in the value that each run computes, or is given."""
        return self.counts or any(getattr(leaf, "is_number", False) or is_traced(leaf) for leaf in self.leaves)

    @property
    def counts(self) -> bool:
        """True if the value is known by a formula."""
        return any(isinstance(leaf, Formula) for leaf in self.leaves)

    @property
    def follows(self) -> bool:
        """True if the value is computed from numbers before."""
        return any(next(variables(leaf.part), None) is not None for leaf in self.leaves if isinstance(leaf, Formula))

    def value(self, fill: Fill) -> Any:
        """Return what is to be written."""
        if self.spec is None:
            return DELETED
        leaves = (leaf.value if isinstance(leaf, Formula) else fill(leaf) for leaf in self.leaves)
        return unflatten([*leaves], self.spec)

    def write(self, value: Any) -> None:
        owner = self.owner.end
        if owner is None:
            return
        if value is DELETED:
            owner.pop(self.key, None)
        elif self.key is WHOLE:
            restore_container(owner, value)
        else:
            owner[self.key] = value

    def found(self) -> list[Any]:
        """Return the leaves of what is there now."""
        owner = self.owner.end
        value = DELETED if owner is None else owner if self.key is WHOLE else owner.get(self.key, DELETED)
        return [] if value is DELETED else flatten(value)[0]


@dataclass(frozen=True, eq=False)
class AttributeWrites:
    """All that a captured forward writes.

    Attributes:
        repeats: a call that finds it all in place has the same graph.
    """

    items: tuple[AttributeWrite, ...] = ()
    repeats: bool = False

    @property
    def changing(self) -> tuple[AttributeWrite, ...]:
        """Writes of what the next call reads, where this one found something else."""
        return tuple(item for item in self.items if item.is_read and not item.settles)

    @property
    def held(self) -> list[Attribute]:
        """The attributes with tensors that the next call reads."""
        return [item.attribute for item in self.items if item.is_held]

    @property
    def unread(self) -> list[Attribute]:
        """The attributes that no call like this one reads."""
        return [item.attribute for item in self.items if not item.is_read]

    @property
    def described(self) -> set[str]:
        """A text of each."""
        return {f"{item.where} {item.key!r} {item.leaves!r} {item.spec!r}" for item in self.items}

    def apply(self, fill: Fill) -> None:
        """Write all, once each formula was evaluated."""
        for item, value in [(item, item.value(fill)) for item in self.items]:
            item.write(value)

    def without_reads(self, attributes: Set[Attribute]) -> AttributeWrites:
        """Return the writes once it is known that no call reads these attributes before it writes them."""
        items = (replace(item, is_read=item.is_read and item.attribute not in attributes) for item in self.items)
        return replace(self, items=tuple(items))

    def at(self, leaf: Fill) -> AttributeWrites:
        """Return the writes with other leaves."""
        return replace(self, items=tuple(replace(item, leaves=tuple(map(leaf, item.leaves))) for item in self.items))


def attribute_writes(
    before: AttributeSnapshot, after: AttributeSnapshot, placed: Mapping[int, Any] | None = None,
    unread: Set[Attribute] = frozenset(),
) -> AttributeWrites:  # fmt: skip
    """Return what a forward wrote between two snapshots.

    Args:
        placed: what stands for a tensor, or a number that was read from one, by its id; None if these stay.
        unread: attributes that it has written, whether they have changed or not.

    Raises:
        CaptureError: a value has another tensor of a trace, or can't be taken apart.
    """
    changed = {*before.changes(after)}
    if not (changed or unread) or len(before.modules) != len(after.modules):
        return AttributeWrites()
    return AttributeWrites(tuple(_Writes(before, after, changed, placed, unread).found()))


@dataclass(frozen=True)
class _Writes:
    """Finds the writes to the attributes that have `changed`."""

    before: AttributeSnapshot
    after: AttributeSnapshot
    changed: set[str]
    placed: Mapping[int, Any] | None
    unread: Set[Attribute]

    def found(self) -> Iterator[AttributeWrite]:
        of_torch = set[int]()
        for (path, module), old, new in zip(
            self.after.modules, self.before.attributes, self.after.attributes, strict=True
        ):
            of_torch |= {id(new.get(name)) for name in OF_TORCH}
            parts = {name for group in OF_TORCH for name in (new.get(group) or ()) if isinstance(new[group], dict)}
            skipped = OF_TORCH | parts
            for name in dict.fromkeys((*old, *new)):
                attribute = Attribute(weakref.ref(module), name)
                is_same = old.get(name, DELETED) is new.get(name, DELETED)
                if name not in skipped and (attribute in self.unread or not is_same):
                    yield from self._item(Route(attribute, None), old, new, name, path)
        for container, items in self.after.copies.values():
            _, old_items = self.before.copies.get(id(container), (None, None))
            if old_items is not None and id(container) not in of_torch:
                yield from self._container(container, old_items, items)

    def _container(self, container: Any, old: Any, new: Any) -> Iterator[AttributeWrite]:
        owner = self.after.owners.get(id(container)) or self.before.owners.get(id(container))
        if owner is None:  # of torch's own
            return
        path, module, name = owner
        attribute = Attribute(weakref.ref(module), name)
        route = Route(attribute, _keys_to(container, attribute.value))
        if route.keys is None:  # it is there no more
            return
        if isinstance(container, dict):
            for key in {**old, **new}:
                if old.get(key, DELETED) is not new.get(key, DELETED):
                    yield from self._item(route, old, new, key, path)
        elif len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
            yield from self._item(route, {WHOLE: old}, {WHOLE: new}, WHOLE, path)

    def _item(
        self, owner: Route, old: Mapping[Any, Any], new: Mapping[Any, Any], key: Any, path: str
    ) -> Iterator[AttributeWrite]:
        """Yield the write of an item, unless what leads to it is as it was."""
        attribute = owner.attribute
        where = f"{path}.{attribute.name}" if path else attribute.name
        if where not in self.changed and attribute not in self.unread:
            return
        ran, part = self.before.outer.ran, attribute.part()
        is_read = part is None or attribute.name in OF_MODULES or ran.takes(part, attribute.name)
        if (value := new.get(key, DELETED)) is DELETED:
            yield AttributeWrite(owner, key, (), None, False, where, where, is_read)
            return
        before, change = old.get(key, DELETED), where
        if type(before) in COUNTERS and type(value) in COUNTERS:
            item = "" if key == attribute.name else f"[{key!r}]"
            change = f"{where}{item} from {before!r} to {value!r}"
        leaves, spec = _opened(value, where)
        placed = tuple(self._placed(leaf, where) for leaf in leaves)
        yield AttributeWrite(owner, key, placed, spec, is_alike(before, value), where, change, is_read)

    def _placed(self, leaf: Any, where: str) -> Any:
        if type(leaf) is CountedNumber:
            return Formula(leaf.formula)
        if self.placed is None or not (isinstance(leaf, Tensor) or is_traced(leaf)):
            return leaf
        placed = self.placed.get(id(leaf), leaf)
        if isinstance(placed, Tensor):
            raise stored_tensor_error(where)
        return placed


def attributes_with_tensors(snapshot: AttributeSnapshot) -> Iterator[Attribute]:
    """Yield those that have a tensor, or one in a container, and are neither parameters nor buffers."""
    for (_, module), attributes in zip(snapshot.modules, snapshot.attributes, strict=True):
        for name, value in attributes.items():
            if name not in OF_TORCH and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                yield Attribute(weakref.ref(module), name)


def is_alike(one: Any, other: Any) -> bool:
    """Return True if two values have the same structure, tensors of the same layout, and equal constants."""
    if one is other:
        return True
    if one is DELETED or other is DELETED:
        return False
    try:
        (leaves, spec), (others, form) = flatten(one), flatten(other)
    except CaptureError:
        return False
    return spec == form and all(map(_is_alike, leaves, others))


def require_plain_values(writes: AttributeWrites) -> None:
    """
    Raises:
        SizeNeededError: there may be symbols in these that can't be found.
    """
    for item in writes.items:
        if item.key is WHOLE or (item.spec is not None and any(item.spec.shells)):
            raise SizeNeededError(f"forward may keep one in {item.where}")


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return layout_of(one) == layout_of(other)
    if is_traced(one) or is_traced(other):
        return type(one) is type(other)
    if CountedNumber in (type(one), type(other)):
        return False
    return bool(constant_key(one) == constant_key(other))


def _is_computed(leaf: Any) -> bool:
    """Return True unless a leaf is a constant."""
    return not isinstance(leaf, (*LEAVES, *OPAQUE, Formula))


def _opened(value: Any, where: str) -> tuple[list[Any], Spec]:
    if any(isinstance(leaf, nn.Module) for leaf in pytree.tree_leaves(value)):
        raise CaptureError(f"forward puts a module into {where}: set it before the first step")
    try:
        return flatten(with_arguments(value))
    except CaptureError as error:
        raise CaptureError(f"forward puts a {type(value).__name__} into {where}, which can't be taken apart") from error
