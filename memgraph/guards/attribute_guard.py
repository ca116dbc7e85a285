"""The attributes and outer variables that a captured graph depends on, as a hashable key.

    self.scale, self.config.act, the global STEP that forward reads   ->   a key that is equal as long as these are

Later calls compare identities, and describe the values again only if one differs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import nn

from .hashed_tuple import HashedTuple
from .module_attributes import AttributeWalk
from .module_proxy import all_submodules
from .variable_guard import VariableGuard, VariableWalk
from .what_ran import Reads

Places = dict[
    int, tuple[Any, Any]
]  # for numbers in a key, by their index there: the dict that contains each, and its key


class AttributeGuard:
    """The attributes of a module and the variables that captures have read; a captured graph depends on their `key`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._walk: AttributeWalk | None = None
        self._variables = VariableGuard()
        self._of_key: VariableWalk | None = None
        self._key = HashedTuple()
        self._ignored: frozenset[tuple[int, str]] = frozenset()
        self._tensors = HashedTuple()

    def same_tensors(self, key: tuple[Hashable, ...]) -> Hashable:
        """Return the key of the module's tensors; that of the previous call if it is equal, whose hash is known."""
        if key != self._tensors:
            self._tensors = HashedTuple(key)
        return self._tensors

    def ignore(self, attributes: Iterable[tuple[nn.Module, str]]) -> bool:
        """Leave attributes of submodules out of the key from now on; return True if it had any of them."""
        new = self._ignored | {(id(owner), name) for owner, name in attributes}
        changes = new != self._ignored
        if changes:
            self._ignored, self._walk = new, None
        return changes

    def grow(self, reads: Reads) -> tuple[Hashable, ...]:
        """Add the variables that another capture rests on, and return what they append to each key."""
        return self._variables.grow(reads)

    def ignore_changed_variables(self) -> bool:
        """Leave variables that have changed since the latest key out of it from now on; return True if there are any.

        A capture has changed them, such as a cache that forward fills once.
        """
        return self._of_key is not None and self._variables.ignore_changes(self._of_key)

    @property
    def key(self) -> Hashable:
        before, walk = self._walk, self._walk
        if walk is None or walk.is_stale():
            self._walk = walk = AttributeWalk(
                ignored=self._ignored, owned={id(part) for _, part in all_submodules(self.module)}
            )
            walk.describe(self.module, 0)
        variables = self._variables.walk
        if walk is not before or variables is not self._of_key:
            self._of_key = variables
            self._key = HashedTuple((*walk.tokens, *variables.tokens))
        return self._key

    @property
    def changed_variables(self) -> tuple[str, ...]:
        """The names of variables that were the latest to change."""
        return self._variables.changed

    @property
    def floats(self) -> Places:
        """For each float in the latest key, by its index there: the dict that contains it, and its key in that dict."""
        return self._places("floats")

    @property
    def numbers(self) -> Places:
        """The same for each int and float."""
        return self._places("ints") | self.floats

    def _places(self, kind: str) -> Places:
        if self._walk is None or self._of_key is None:
            return {}
        begin = len(self._walk.tokens)
        return getattr(self._walk, kind) | {begin + i: at for i, at in getattr(self._of_key, kind).items()}
