"""The attributes of a module and the variables that its captures have read, as groups of tokens.

    self.scale, self.config.act, the global STEP that forward reads   ->   groups that are equal as long as these are

Later calls compare identities, and describe the values again only if one differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version

from .assumptions import ATTRIBUTES, Assumptions, Facts, Group, Place
from .module_attributes import AttributeWalk
from .module_proxy import all_submodules
from .owned_tensors import TensorFacts, owned_tensors
from .variable_guard import VariableGuard, VariableWalk
from .variable_scope import Names, Reads, has_read, overridden
from .written_attributes import Attribute, written_attributes

Owned = tuple[dict[str, Any], str]  # the dict of a submodule that has a tensor, and its name there


class AttributeGuard:
    """The attributes of a module and the variables that captures have read; these rest on their `groups`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.variables = VariableGuard(module)
        self._walk: AttributeWalk | None = None
        self._names: list[Names] = []  # of the attributes that each capture was the first to take
        self._more: dict[int, AttributeWalk] = {}  # over those of later captures
        self._order: list[tuple[bool, int]] = []  # of the groups: if it is one of `_names`, and its number there
        self._ignored: frozenset[tuple[int, str]] = frozenset()
        self._written = written_attributes(module)
        self._written_keys = self._written.keys
        self._facts = TensorFacts([])
        self._owned: tuple[list[Owned], list[Owned]] = ([], [])
        self._owned_by: tuple[AttributeWalk | None, list[int]] = (None, [])
        self._asked: list[AttributeWalk] = []
        self._read: tuple[list[Tensor], list[Tensor]] = ([], [])

    @property
    def owned_by(self) -> object:
        """An object that is another one once the module may own other tensors."""
        return self._owned_by

    @property
    def owned(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters and buffers of the module, by the latest groups."""
        walk = self._walk
        versions = [] if walk is None else [*map(dict_version, walk.states)]
        if walk is not None and self._owned_by == (walk, versions):
            parameters, buffers = ([items[name] for items, name in group] for group in self._owned)
            return parameters, buffers
        parameters, buffers = owned_tensors(self.module)
        self._owned_by = walk, versions
        # Not the tensors, which this would keep alive, nor references to them, with which torch swaps none.
        places = {
            id(tensor): (items, name) for items in (walk.states if walk else ()) for name, tensor in items.items()
        }
        if places.keys() >= {*map(id, parameters), *map(id, buffers)}:
            self._owned = [places[id(p)] for p in parameters], [places[id(b)] for b in buffers]
        else:
            self._owned_by = None, []
        return parameters, buffers

    def taken(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters and buffers of the latest `tensors`, which are kept no longer."""
        read, self._read = self._read, ([], [])
        return read

    @property
    def tensors(self) -> Group:
        """The facts of these; the same object as for the previous call if they are equal."""
        parameters, buffers = self._read = self.owned
        tensors = [*parameters, *buffers]
        if not self._facts.hold(tensors):
            facts = TensorFacts(tensors)
            if facts.group == self._facts.group:
                facts.group = self._facts.group
            self._facts = facts
        return self._facts.group

    def ignore(self, attributes: Iterable[tuple[nn.Module, str]]) -> bool:
        """Leave attributes of submodules out from now on; return True if any of them was there."""
        new = self._ignored | {(id(owner), name) for owner, name in attributes}
        changes = new != self._ignored
        if changes:
            self._ignored = new
            self._forget_walks()
        return self._ignore_written() or changes

    def _ignore_written(self) -> bool:
        """Leave out what captured calls write and the facts of arguments have, or nothing reads."""
        changes = self._written_keys is not self._written.keys
        if changes:
            self._written_keys = self._written.keys
            self._forget_walks()
        return changes

    def _forget_walks(self) -> None:
        self._walk = None
        self._more.clear()

    def grow(self, reads: Reads, asked: Sequence[AttributeWalk] = ()) -> bool:
        """Add the variables and the attributes that another capture rests on.

        Return True if less is described than before: with the first capture, the attributes that it does not take go,
        unless something has changed since a walk that was `asked`.
        """
        before = len(self.variables.latest)
        self.variables.grow(reads)
        self._order += [(False, number) for number in range(before, len(self.variables.latest))]
        read = None
        if asked and reads.attributes is not None:
            paths = _paths(self.module)
            read = frozenset((path, name) for number, name in reads.attributes for path in paths.get(number, ()))
        if not self._names:
            is_known = asked and not asked[0].is_stale()
            self._names.append(Names(read, reads.named) if is_known else Names(None))
            self._walk = None
            return self._names[0].read is not None
        if self._names[0].read is None:
            return False
        known = frozenset[tuple[str, str]]().union(*(each.read or () for each in self._names))
        named = [each.named for each in self._names]
        if any(each.kinds for each in asked) and not _covers(named, reads.named):
            known = frozenset()  # these attributes are described once more, as objects in them have more that counts
        if read is None or not read <= known:
            self._names.append(Names(read, reads.named, known))
            self._order.append((True, len(self._names) - 1))
        return False

    @property
    def groups(self) -> tuple[Group, ...]:
        """The tokens of the attributes, and of what each capture was the first to read; the same if nothing changed."""
        self._ignore_written()
        if self._walk is None or self._walk.is_stale():
            self._walk = self._described(self._names[0] if self._names else None)
        variables = self.variables.walks
        later = [self._later_walk(number) if is_name else variables[number] for is_name, number in self._order]
        self._asked = [self._walk, *later]
        return tuple(each.group for each in self._asked)

    def _later_walk(self, number: int) -> AttributeWalk:
        walk = self._more.get(number)
        if walk is None or walk.is_stale():
            self._more[number] = walk = self._described(self._names[number])
        return walk

    def _described(self, names: Names | None) -> AttributeWalk:
        owned = {id(part): path for path, part in all_submodules(self.module)}
        walk = AttributeWalk(ignored=self._ignored | self._written_keys, owned=owned, names=names)
        walk.describe(self.module, 0)
        return walk

    def ignore_changed_variables(self, asked: Sequence[AttributeWalk]) -> bool:
        """Leave out from now on what has changed since earlier walks; return True if anything has.

        A capture has changed them, such as a cache that forward fills once.
        """
        return self.variables.ignore_changes([walk for walk in asked if isinstance(walk, VariableWalk)])

    @property
    def asked(self) -> Sequence[AttributeWalk]:
        """The walks of the latest groups."""
        return self._asked

    def numbers(self) -> dict[Place, tuple[Any, Any]]:
        """Return the dict that contains each number of the latest groups, and its key there."""
        found = ((place, at) for place, at in self._in_dicts() if type(at[0].get(at[1])) in (int, float))
        return dict(found)

    def unread_numbers(self, reads: Reads) -> Iterator[Place]:
        """Yield the places of numbers in attributes of submodules that a capture has not read."""
        if (read := reads.attributes) is None:
            return
        parts = {id(vars(part)): part for _, part in all_submodules(self.module)}
        for place, (items, name) in self.numbers().items():
            part = parts.get(id(items))
            kind: Any = type(part)
            if part is not None and "__getattribute__" not in overridden(kind) and not has_read(read, id(part), name):
                yield place

    def _in_dicts(self) -> Iterator[tuple[Place, tuple[Any, Any]]]:
        for group, walk in enumerate(self._asked, ATTRIBUTES):
            for index, at in walk.in_dicts.items():
                yield (group, index), at

    def replaced_tensors(self, assumptions: Assumptions, facts: Facts) -> list[Attribute]:
        """Return the attributes with other tensors than a capture assumes; none if a call differs in more."""
        places: dict[Place, tuple[dict[Any, Any], Any]] = dict(self._in_dicts())
        parts = {id(vars(part)): part for _, part in all_submodules(self.module)}
        found: list[Attribute] = []
        for group, index in assumptions.differing(facts):
            # A tensor has two tokens, and may have another layout.
            items, name = places.get((group, index)) or places.get((group, index - 1)) or ({}, "")
            if id(items) not in parts or type(items.get(name)) is not Tensor:
                return []
            found.append(Attribute(ref(parts[id(items)]), name))
        return found

    def label(self, place: Place) -> str:
        """Return what a token of the latest groups stands for: the path of an attribute, or a variable."""
        group, index = place
        return self._asked[group - ATTRIBUTES].label(index)


def _paths(module: nn.Module) -> dict[int, list[str]]:
    """Return all paths of each submodule, by its id."""
    paths: dict[int, list[str]] = {}
    for path, part in (*module.named_modules(remove_duplicate=False), *all_submodules(module)):
        paths.setdefault(id(part), []).append(path)
    return paths


def _covers(known: Sequence[frozenset[str] | None], named: frozenset[str] | None) -> bool:
    """Return True if earlier names are all that there are, or have the others among them."""
    if None in known:
        return True
    return named is not None and named <= frozenset[str]().union(*(each or () for each in known))
