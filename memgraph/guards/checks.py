"""Things that were read, and whether they are the same now.

checks.add_list(table);  table.append(7)   ->   checks.fail()

Items of dicts that were read: most dicts are never written to.

    reads.add(vars(layer), itemgetter("p", "training"));  layer.p = 0.2   ->   reads.have_changed()

Torch watches dicts for its own guards, and has a number for each that is another one once the dict was written to.
Where that is the number of the last look, the dict is not read again.  Python 3.13 writes attributes of an object past
its dict, and no version tells.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._dynamo.guards import dict_version

SEES_ATTRIBUTES = sys.version_info < (3, 13)

Read = Callable[[Any], tuple[Any, ...]]
Keys = tuple[Any, ...]


class Check(NamedTuple):
    """A function that reads part of a thing, and its result at the time of a walk."""

    read: Callable[[], object]
    expected: object


class Checks:
    """Things that a walk has read, all of a kind at once where there are many. Tensors are not kept alive."""

    def __init__(self) -> None:
        self.dicts = ReadDicts()
        self._checks: list[Check] = []
        self._typed: list[Any] = []  # objects whose class and `__dict__` can be assigned
        self._types: list[type] = []
        self._insides: list[dict[str, Any]] = []
        self._empty: list[Any] = []  # as most of a module's dicts are
        self._lists: list[list[Any]] = []
        self._lengths: list[int] = []
        self._items: list[Any] = []
        self._alive: list[Any] = []  # so that no id is reused

    def fail(self) -> bool:
        """Return True if anything that was read has changed."""
        try:
            if any(self._empty) or [*map(type, self._typed)] != self._types or self.dicts.have_changed():
                return True
            if not all(map(is_, map(vars, self._typed), self._insides)):
                return True
            if [*map(len, self._lists)] != self._lengths or not all(map(is_, chain(*self._lists), self._items)):
                return True
            for read, expected in self._checks:  # no generator: every call of the module comes by
                if read() != expected:
                    return True
        except (KeyError, ValueError):  # an attribute, or what a cell held, was deleted
            return True
        return False

    def add(self, read: Callable[[], object]) -> None:
        """Later, `read` has to return an equal thing."""
        self._checks.append(Check(read, read()))

    def add_identities(self, read: Callable[[], Iterable[Any]]) -> None:
        """Later, `read` has to return the same things."""
        self.keep(read())  # so that none is at the address of another
        self.add(lambda: [*map(id, read())])

    def add_empty(self, container: Any) -> None:
        """Later, the container, or None, has to be as empty."""
        self._empty.append(container)

    def add_list(self, thing: list[Any]) -> None:
        """Later, the list has to have the same items."""
        self.keep(thing)
        if any(isinstance(each, Tensor) for each in thing):
            self.add(lambda: [*map(id, thing)])
        else:
            self._lists.append(thing)
            self._lengths.append(len(thing))
            self._items += thing

    def add_attributes(self, thing: Any, attributes: dict[str, Any], read: Read, ignored: tuple[str, ...]) -> None:
        """Later, a thing has to have the same attributes; of the `ignored` ones it may have any or none."""
        found = read(attributes)
        self.keep(found)
        self._typed.append(thing)
        self._types.append(type(thing))
        self._insides.append(attributes)
        if any(isinstance(each, Tensor) for each in found):
            self.add(lambda: (keys_of(attributes, ignored), *map(id, read(attributes))))
        else:
            self.dicts.add(attributes, read, is_of_object=True, ignored=ignored)

    def keep(self, things: Iterable[Any]) -> None:
        """Keep things alive."""
        self._alive += [thing for thing in things if not isinstance(thing, Tensor)]


class ReadDicts:
    """Dicts, with the items that were read of each."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        # With the items that were found, the keys in their order, and keys that it may have or not.
        self._reads: list[tuple[Read, tuple[Any, ...], Keys, tuple[str, ...]]] = []
        self._versions: list[int] = []
        self._objects = ObjectDicts()  # where no version counts
        self._empty: list[dict[Any, Any]] = []

    def add(
        self, mapping: dict[Any, Any], read: Read, is_of_object: bool = False, ignored: tuple[str, ...] = ()
    ) -> None:  # fmt: skip
        """Add a dict; later `read` has to return the same objects, which are kept alive here.

        Those are all items, but for those of the `ignored` keys.
        """
        if is_of_object and not SEES_ATTRIBUTES:
            self._objects.add(mapping, read, ignored)
            return
        if not mapping:  # from Python 3.12 on `update` of an empty dict gives it no new version
            self._empty.append(mapping)
        self._versions.append(dict_version(mapping))
        self._dicts.append(mapping)
        self._reads.append((read, read(mapping), keys_of(mapping, ignored), ignored))

    def have_changed(self) -> bool:
        """Return True if other objects would be read now.

        Raises:
            KeyError: something that was read is gone.
        """
        if self._objects.have_changed() or any(self._empty):
            return True
        versions = [*map(dict_version, self._dicts)]
        if versions != self._versions:
            for i, (now, then) in enumerate(zip(versions, self._versions, strict=True)):
                read, found, keys, ignored = self._reads[i]
                mapping = self._dicts[i]
                if now != then and (keys_of(mapping, ignored) != keys or not all(map(is_, read(mapping), found))):
                    return True
            self._versions = versions
        return False


class ObjectDicts:
    """The dicts of objects, which are read each time: all of one kind at once, as most are of a few classes."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._all_keys: list[Keys] = []
        self._keys: list[Keys] = []  # but for the ignored ones
        self._ignored: list[tuple[str, ...]] = []
        self._alike: dict[Read, tuple[list[dict[Any, Any]], list[Any]]] = {}  # and what was found in these

    def add(self, mapping: dict[Any, Any], read: Read, ignored: tuple[str, ...]) -> None:
        """As of `ReadDicts`."""
        self._dicts.append(mapping)
        self._all_keys.append(tuple(mapping))
        self._keys.append(keys_of(mapping, ignored))
        self._ignored.append(ignored)
        mappings, found = self._alike.setdefault(read, ([], []))
        mappings.append(mapping)
        found += read(mapping)

    def have_changed(self) -> bool:
        """As of `ReadDicts`."""
        if [*map(tuple, self._dicts)] != self._all_keys and [*map(keys_of, self._dicts, self._ignored)] != self._keys:
            return True
        return not all(
            all(map(is_, chain.from_iterable(map(read, mappings)), found))
            for read, (mappings, found) in self._alike.items()
        )


def keys_of(mapping: dict[Any, Any], ignored: tuple[str, ...]) -> Keys:
    """Return the keys in their order, but for some."""
    return tuple(key for key in mapping if key not in ignored) if ignored else tuple(mapping)


def items_of(names: Iterable[str]) -> Read:
    """Return what reads the items of these keys; the same for the same ones."""
    return _items_of(tuple(names))


@lru_cache(4096)
def _items_of(names: tuple[str, ...]) -> Read:
    doubled = names * 2 if len(names) == 1 else names  # which gives a tuple as well
    return itemgetter(*doubled) if doubled else _nothing


def _nothing(mapping: object) -> tuple[()]:
    return ()
