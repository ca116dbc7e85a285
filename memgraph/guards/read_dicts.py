"""Items of dicts that were read, and whether they are still there: most dicts are never written to.

    reads.add(vars(layer), itemgetter("p", "training"));  layer.p = 0.2   ->   reads.have_changed()

Torch watches dicts for its own guards, and has a number for each that is another one once the dict was written to.
Where that is the number of the last look, the dict is not read again.  Python 3.13 writes attributes of an object past
its dict, and no version tells.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any

from torch._C._dynamo.guards import dict_version

SEES_ATTRIBUTES = sys.version_info < (3, 13)

Read = Callable[[Any], tuple[Any, ...]]


class ReadDicts:
    """Dicts, with the items that were read of each."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        # With the items that were found, the dict's size, and keys that it may have or not.
        self._reads: list[tuple[Read, tuple[Any, ...], int, tuple[str, ...]]] = []
        self._versions: list[int] = []
        self._objects: list[tuple[dict[Any, Any], Read, tuple[str, ...]]] = []  # where no version counts
        self._found: list[Any] = []  # all items of these
        self._sizes: list[int] = []
        self._empty: list[dict[Any, Any]] = []

    def add(
        self, mapping: dict[Any, Any], read: Read, is_of_object: bool = False, ignored: tuple[str, ...] = ()
    ) -> None:  # fmt: skip
        """Add a dict; later `read` has to return the same objects, which are kept alive here.

        Those are all items, but for those of the `ignored` keys.
        """
        if is_of_object and not SEES_ATTRIBUTES:
            self._objects.append((mapping, read, ignored))
            self._found += read(mapping)
            self._sizes.append(size_of(mapping, ignored))
            return
        if not mapping:  # from Python 3.12 on `update` of an empty dict gives it no new version
            self._empty.append(mapping)
        self._versions.append(dict_version(mapping))
        self._dicts.append(mapping)
        self._reads.append((read, read(mapping), size_of(mapping, ignored), ignored))

    def have_changed(self) -> bool:
        """Return True if other objects would be read now.

        Raises:
            KeyError: something that was read is gone.
        """
        if self._objects and [size_of(mapping, ignored) for mapping, _, ignored in self._objects] != self._sizes:
            return True
        if not all(map(is_, chain.from_iterable(read(mapping) for mapping, read, _ in self._objects), self._found)):
            return True
        if any(self._empty):
            return True
        versions = [*map(dict_version, self._dicts)]
        if versions != self._versions:
            for i, (now, then) in enumerate(zip(versions, self._versions, strict=True)):
                read, found, count, ignored = self._reads[i]
                mapping = self._dicts[i]
                if now != then and (size_of(mapping, ignored) != count or not all(map(is_, read(mapping), found))):
                    return True
            self._versions = versions
        return False


def size_of(mapping: dict[Any, Any], ignored: tuple[str, ...]) -> int:
    """Return the number of items, but for those of some keys."""
    return len(mapping) - sum(map(mapping.__contains__, ignored)) if ignored else len(mapping)
