"""The Python attributes of a module at one moment: compare them, restore them, and refuse tensors of a trace there.

    before = AttributeSnapshot(module);  ...;  before.changed(AttributeSnapshot(module))   ->   "layers.0.count"

Capture runs forward on fake tensors, and must leave the module as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..errors import CaptureError
from ..tensors.traced_number import TracedFloat, TracedInt
from .containers import RESTORED, has_same_items, items_of, restore_container
from .contents import IdentityKey, slots
from .module_attributes import HOOKS, IGNORED, STATE, AttributeWalk
from .module_proxy import all_submodules
from .outer_snapshot import OuterSnapshot, holds
from .what_ran import WhatRan
from .written_attributes import Attribute

RNN_CACHES = {"_flat_weights", "_flat_weight_refs"}  # a recurrent layer's own lists of its weights
CONTAINERS = (dict, OrderedDict, list)
COUNTERS = (bool, int, float, str)


class _SnapshotWalk(AttributeWalk):
    """Tells things apart that several attributes lead to: another one may be there."""

    def described_before(self, thing: Any) -> Hashable:
        if id(thing) in self.inputs:
            return "input", self.inputs[id(thing)]
        return "described", IdentityKey(thing)  # its number would be another once something new is before it


class AttributeSnapshot:
    """The attributes of all submodules, with copies of the containers in them, at any depth; and variables of what ran.

    The tensors `inputs` of a call or its trace are compared by position: every trace has others.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor] = (), ran: WhatRan | None = None) -> None:
        self.outer = OuterSnapshot(ran, inputs)
        self.module, self.modules = module, all_submodules(module)
        self.attributes = [dict(vars(part)) for _, part in self.modules]
        self._slots = [
            (part, name, getattr(part, name)) for _, part in self.modules for name in slots(part) if hasattr(part, name)
        ]
        self._walk = _SnapshotWalk({id(tensor): position for position, tensor in enumerate(inputs)})
        # So that the walk opens no submodule: each is described below.
        self._walk.numbers |= {id(part): number for number, (_, part) in enumerate(self.modules)}
        self.tokens: dict[str, Hashable] = {}
        self._noted = 0
        self.owners: dict[int, tuple[str, nn.Module, str]] = {}  # by the id of a container: the attribute that has it
        for path, part in self.modules:
            for name, token in self._describe(part):
                self.tokens[_path(path, name)] = token
                self._note_owner(path, part, name)
        self.outer.ran.kinds |= self._walk.kinds
        direct = [value for attributes in self.attributes for value in attributes.values() if type(value) in CONTAINERS]
        containers = (value for value in (*direct, *self._walk.containers) if type(value) in RESTORED)
        self.copies = {id(container): (container, container.copy()) for container in containers}

    def changed(self, later: AttributeSnapshot) -> str | None:
        """Return the first attribute that was added, removed or changed."""
        return next(iter(self.changes(later)), None)

    def changes(self, later: AttributeSnapshot) -> tuple[str, ...]:
        """Return all attributes that were added, removed or changed."""
        names = dict.fromkeys((*later.tokens, *self.tokens))
        return tuple(name for name in names if self.tokens.get(name) != later.tokens.get(name))

    def paths(self, attributes: Iterable[Attribute]) -> set[str]:
        """Return the paths of attributes."""
        paths = {id(part): path for path, part in self.modules}
        return {_path(paths[number], name) for number, name in (each.key for each in attributes) if number in paths}

    def forget_values(self) -> None:
        """Keep descriptions alone, which hold nothing alive."""
        self.attributes, self.copies, self._slots, self._walk = [], {}, [], _SnapshotWalk()

    @contextmanager
    def restored(self) -> Iterator[AttributeSnapshot]:
        """Restore the module at the end of the block."""
        try:
            yield self
        finally:
            self.restore()

    @contextmanager
    def restored_attributes(self) -> Iterator[AttributeSnapshot]:
        """Restore attributes at the end of the block, and variables elsewhere only if it fails."""
        try:
            yield self
        except BaseException:
            self.outer.restore()
            raise
        finally:
            self.restore_attributes()

    def restore(self) -> None:
        """Put back every attribute, every variable and every container that changed."""
        self.restore_attributes()
        self.outer.restore()

    def restore_attributes(self) -> None:
        """Put back every attribute and every container that changed."""
        for (_, module), before in zip(self.modules, self.attributes, strict=True):
            if not has_same_items(vars(module), before):
                vars(module).clear()
                vars(module).update(before)
        for part, name, value in self._slots:
            setattr(part, name, value)
        for container, before in self.copies.values():
            restore_container(container, before)

    def refuse_tensors(self, inputs: set[int]) -> None:
        """Raise if forward left a fake tensor on the module that is not in `inputs` (ids)."""
        for path, module in self.modules:
            for name, tensor in attached_values(module):
                if isinstance(tensor, FakeTensor) and id(tensor) not in inputs:
                    raise stored_tensor_error(_path(path, name))

    def _note_owner(self, path: str, part: nn.Module, name: str) -> None:
        """Note that the containers described since the last note are of an attribute."""
        for container in self._walk.containers[self._noted :]:
            self.owners.setdefault(id(container), (path, part, name))
        self._noted = len(self._walk.containers)

    def _describe(self, part: nn.Module) -> Iterator[tuple[str, Hashable]]:
        walk, ignored = self._walk, IGNORED - {*STATE, *HOOKS}
        if isinstance(part, nn.RNNBase):
            ignored |= RNN_CACHES
        for name, value in vars(part).items():
            begin = len(walk.tokens)
            if name == "_modules":
                yield from ((key, child is not None and IdentityKey(child)) for key, child in value.items())
            elif name in STATE:
                yield from ((key, True) for key in value)
            elif name not in ignored:
                walk.describe_state(value, by_identity=True) if name in HOOKS else walk.describe(value, 1)
                yield name, tuple(walk.tokens[begin:])
        for name in slots(part):
            begin = len(walk.tokens)
            walk.describe(getattr(part, name, None), 1)
            yield name, tuple(walk.tokens[begin:])


def holds_traced(tokens: object) -> bool:
    """Return True if the description of an attribute names a tensor of a trace, an input, or a number read from one."""
    described = tokens if isinstance(tokens, tuple) else ()
    return holds(tokens, (FakeTensor, TracedFloat, TracedInt)) or any(_is_input(token) for token in described)


def _is_input(token: object) -> bool:
    return isinstance(token, tuple) and token[:1] == ("input",)


def attached_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield attributes, and the items of containers among them, with the attribute's name."""
    for name, value in vars(module).items():
        if type(value) in CONTAINERS:
            for key, item in items_of(value):
                yield (str(key) if name in STATE else name), item
        else:
            yield name, value


def stored_tensor_error(name: str) -> CaptureError:
    """Return the error for a tensor that forward stores on its module."""
    return CaptureError(
        f"forward stores a tensor in {name}, as no captured step can: return it, or register it "
        "as a buffer of its shape and dtype before the first step"
    )


def _path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
