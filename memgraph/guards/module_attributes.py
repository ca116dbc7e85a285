"""Attributes of a module that forward may read, as a hashable key.

    self.scale, self.config.act, self.tables["x"]   ->   a key that is equal as long as these are

A walk describes attributes, containers, objects in them, and hooks, and records a check for each. Later calls run the
checks, which compare identities, and walk again only if one fails.
"""

from __future__ import annotations

import functools
import random
import types
import weakref
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .contents import (
    STATES,
    IdentityKey,
    array_content,
    holds_objects,
    inside_of,
    is_array,
    is_weak,
    mutable_layout,
    referents_of,
    slots,
    state_contents,
)  # fmt: skip
from .module_proxy import ModuleProxy
from .packages import is_configuration, is_from_torch, tells_reads
from .read_dicts import ReadDicts, size_of
from .variable_scope import Names

MAX_DEPTH = 8  # below a module; objects further down are compared by identity
CONSTANTS = (
    bool, int, float, complex, str, bytes, range, types.NoneType, types.EllipsisType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
OPAQUE = (
    type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
    random.Random, torch.Generator, torch.SymFloat,
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
)  # fmt: skip
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STATE = ("_parameters", "_buffers")
# transformers' `save_pretrained` writes these into a configuration.
WRITTEN_BY_SAVE = frozenset({"architectures", "dtype"})
# The other attributes that torch sets on every module do not affect forward.
IGNORED = frozenset(vars(nn.Module())) - {"training", "_modules"}


Label = tuple[Any, Any]  # of what contains a thing, or None; and its name in there


class Check(NamedTuple):
    """A function that reads part of a module, and its result at the time of the walk."""

    read: Callable[[], object]
    expected: object


class AttributeWalk:
    """The tokens of one walk, with a path for each, and the checks that tell whether another would give the same.

    `inputs` maps the id of a tensor to its position. Such a tensor is described by position, not by identity.
    `ignored` are attributes, by the id of their module and name, that are not described.
    `owned` are the ids of modules whose parameters and buffers the key of a call has; None for all.
    `names` has the attributes of these modules that are described; None for all.
    """

    max_depth = MAX_DEPTH

    def __init__(
        self, inputs: Mapping[int, int] | None = None, ignored: Set[tuple[int, str]] = frozenset(),
        owned: Set[int] | None = None, names: Names | None = None,
    ) -> None:  # fmt: skip
        self.inputs, self.ignored, self.owned, self.names = inputs or {}, ignored, owned, names
        self.tokens: list[Hashable] = []
        self.numbers: dict[int, int] = {}  # id -> number, for things that were described before
        self.containers: list[Any] = []
        self.in_dicts: dict[int, tuple[Any, Any]] = {}  # token of a number or a tensor -> its dict, and its key there
        self.paths: dict[int, list[str]] = defaultdict(list)  # of modules, by their ids
        self._labels: list[tuple[int, Label]] = []  # by the first token of each named thing
        self._label: Label | None = None
        self.states: list[dict[str, Any]] = []  # the parameters and buffers of each submodule that has some
        self._checks: list[Check] = []
        self._dicts = ReadDicts()
        self._typed: list[Any] = []  # objects whose class and `__dict__` can be assigned
        self._types: list[type] = []
        self._insides: list[dict[str, Any]] = []
        self._empty: list[Any] = []  # most of a module's dicts are empty, and `any` is faster than a check for each
        self._alive: list[Any] = []  # so that no id is reused
        self.kinds = set[type]()  # of objects, of whose attributes those count that are read

    @functools.cached_property
    def group(self) -> tuple[Hashable, ...]:
        """The tokens, once all is described."""
        return tuple(self.tokens)

    def label(self, index: int) -> str:
        """Return the path of the thing that a token stands for, as `layers.0.scale`."""
        at = bisect_right(self._labels, index, key=itemgetter(0)) - 1
        label, names = self._labels[at][1] if at >= 0 else None, list[str]()
        while label is not None:
            label, name = label
            names.append(str(name))
        return ".".join(reversed(names))

    def is_stale(self) -> bool:
        """Return True if anything that was read has changed."""
        try:
            if any(self._empty) or [*map(type, self._typed)] != self._types or self._dicts.have_changed():
                return True
            if not all(map(is_, map(vars, self._typed), self._insides)):
                return True
            for read, expected in self._checks:  # no generator: every call of the module comes by
                if read() != expected:
                    return True
        except (KeyError, ValueError):  # an attribute, or what a cell held, was deleted
            return True
        return False

    def describe(self, thing: Any, depth: int) -> None:
        """Append the tokens of a thing and of its contents."""
        kind = type(thing)
        if kind in CONSTANTS:
            # 0.0 == -0.0, nan != nan, and 1 == True.
            self.tokens.append((kind, repr(thing) if kind in (float, complex) else thing))
        elif id(thing) in self.numbers:
            if isinstance(thing, nn.Module):
                self.paths[id(thing)].append(self.label(len(self.tokens)))
            self.tokens.append(self.described_before(thing))
        else:
            self.numbers[id(thing)] = len(self.numbers)
            self._describe_new(thing, depth)

    def described_before(self, thing: Any) -> Hashable:
        """Return the token of a thing that was described before."""
        return "described", self.numbers[id(thing)]

    def describe_state(self, values: dict[Any, Any] | None, by_identity: bool) -> None:
        """Append hooks by identity. Parameters and buffers that a call owns count by name: its key has the tensors."""
        if not values:
            self._empty.append(values)
            self.tokens.append(0)
            return
        if by_identity:
            self._check_mapping(values)
            self.tokens.append(tuple(map(IdentityKey, values.values())))
        else:
            self.containers.append(values)
            self.states.append(values)
            self._check(lambda: tuple(values))
            self.tokens.append(tuple(values))

    def _describe_new(self, thing: Any, depth: int) -> None:
        if is_weak(thing):
            self._alive.append(thing)
            self._check(lambda: self._behind(thing, depth))
            self.tokens += [IdentityKey(type(thing)), self._behind(thing, depth)]
            self._describe_own(thing, depth)
            return
        if isinstance(thing, Tensor):
            self._describe_tensor(thing)
            return
        self._alive.append(thing)
        if isinstance(thing, nn.Module):
            self._describe_module(thing, depth)
        elif is_array(thing) and not holds_objects(thing):
            self._check(lambda: array_content(thing))
            self.tokens += [IdentityKey(type(thing)), array_content(thing)]
            self._describe_own(thing, depth)
        elif (read := STATES.get(type(thing))) is not None:
            self._check_identities(lambda: state_contents(read(thing)))
            self.tokens.append(IdentityKey(thing))
            self.describe(read(thing), depth + 1)
        elif inside := inside_of(thing):
            self._check_identities(lambda: inside_of(thing))
            self.tokens.append(IdentityKey(thing))
            for each in inside:
                self.describe(each, depth + 1)
            self._describe_own(thing, depth)
        elif depth >= self.max_depth or isinstance(thing, OPAQUE) or is_from_torch(thing):
            self.tokens.append(IdentityKey(thing))
        else:
            self._describe_object(thing, depth)

    def _describe_tensor(self, tensor: Tensor) -> None:
        """The graph reads the tensor itself, so its values do not matter."""
        reference = weakref.ref(tensor)
        if id(tensor) in self.inputs:
            self._check(lambda: reference() is None)
            self.tokens.append(("input", self.inputs[id(tensor)]))
        else:
            self._check(lambda: mutable_layout(reference()))
            self.tokens += [IdentityKey(tensor), mutable_layout(tensor)]

    def _behind(self, thing: Any, depth: int) -> tuple[Hashable, ...]:
        """Return the tokens of what a weak reference leads to, which nothing may keep alive."""
        walk = AttributeWalk(self.inputs, self.ignored, self.owned, self.names)
        walk.numbers |= dict.fromkeys(self.owned or (), 0)
        for each in referents_of(thing):
            kind: Any = type(each)  # another one counts by identity: nothing tells what is read of it
            is_open = kind in (*CONSTANTS, dict, list, tuple, types.FunctionType) or tells_reads(kind)
            walk.describe(each, depth + 1) if is_open else walk.tokens.append(IdentityKey(each))
        self.kinds |= walk.kinds
        return tuple(walk.tokens)

    def _describe_own(self, thing: Any, depth: int) -> None:
        """Describe the attributes of a thing that is described otherwise."""
        if attributes := getattr(thing, "__dict__", None):
            self._describe_attributes(thing, attributes, depth)

    def _describe_module(self, module: nn.Module, depth: int) -> None:
        attributes, is_owned = vars(module), self.owned is None or id(module) in self.owned
        # What a proxy has is read by the code of this package, which is not noted.
        wanted = self.names if is_owned and not issubclass(type(module), ModuleProxy) else None
        self.paths[id(module)].append(path := self.label(len(self.tokens)))
        names, ignored = self._divided(module, attributes, wanted, path)
        if wanted is not None and wanted.known:  # the other walk has the rest
            self._describe_more(module, attributes, names, ignored)
            return
        read = itemgetter(*names, *(name for name in (*STATE, *HOOKS) if name in attributes))
        self._read_attributes(module, attributes, read, ignored)
        self.tokens += [IdentityKey(type(module)), names]
        self._describe_slots(module, depth)
        for name in (*STATE, *HOOKS):
            if name in STATE and not is_owned:
                self._describe_mapping(attributes[name], depth)
            else:
                self.describe_state(attributes.get(name), by_identity=name in HOOKS)
        for name in names:
            # Depth counts from the innermost module.
            if name == "_modules":
                self._describe_children(attributes[name])
            else:
                self._describe_item(attributes, name, depth + 1)

    def _divided(
        self, module: nn.Module, attributes: dict[str, Any], wanted: Names | None, path: str
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the attributes that are described, and those that are not, though torch does not set them."""
        kind, own = type(module), [name for name in attributes if name not in IGNORED]
        names = tuple(
            name
            for name in own
            if (id(module), name) not in self.ignored and (wanted is None or wanted.has(path, kind, name))
        )
        return names, tuple(name for name in own if name not in names)

    def _describe_more(
        self, module: nn.Module, attributes: dict[str, Any], names: tuple[str, ...], ignored: tuple[str, ...]
    ) -> None:
        """Describe attributes that another walk has left out."""
        self._read_attributes(module, attributes, lambda found: tuple(map(found.__getitem__, names)), ignored)
        self.tokens.append(names)
        for name in names:
            self._describe_item(attributes, name, 1)
        self._describe_children(attributes["_modules"])

    def _read_attributes(self, thing: Any, attributes: dict[str, Any], read: Any, ignored: tuple[str, ...]) -> None:
        found = read(attributes)
        self._keep(found)
        self._typed.append(thing)
        self._types.append(type(thing))
        self._insides.append(attributes)
        if any(isinstance(each, Tensor) for each in found):  # which is not kept alive
            self._check(lambda: (size_of(attributes, ignored), *map(id, read(attributes))))
        else:
            self._dicts.add(attributes, read, is_of_object=True, ignored=ignored)

    def _describe_item(self, mapping: dict[Any, Any], name: Any, depth: int) -> None:
        """Describe an item of a dict, and record where a number or a tensor is."""
        if type(mapping[name]) in (int, float, Tensor):
            self.in_dicts[len(self.tokens)] = mapping, name
        self._describe_named(mapping[name], name, depth)

    def _describe_named(self, thing: Any, name: Any, depth: int) -> None:
        outer, self._label = self._label, (self._label, name)
        self._labels.append((len(self.tokens), self._label))
        self.describe(thing, depth)
        self._label = outer

    def _describe_children(self, children: dict[str, nn.Module | None]) -> None:
        if not children:
            self._empty.append(children)
            return
        self._check_mapping(children)
        self.tokens.append(tuple(children))
        for name, module in children.items():
            self._describe_named(module, name, 0)

    def _describe_object(self, thing: Any, depth: int) -> None:
        """A container, an object with attributes, or both."""
        kind: Any = type(thing)
        is_container = isinstance(thing, dict | list | tuple | deque | set | frozenset)
        self.tokens.append((IdentityKey(kind), *((len(thing), getattr(thing, "maxlen", 0)) if is_container else ())))
        if is_container:
            self._describe_container(thing, depth)
        if isinstance(attributes := getattr(thing, "__dict__", None), dict):
            self._describe_attributes(thing, attributes, depth)
        self._describe_slots(thing, depth)
        if not (is_container or slots(thing)) and attributes is None:
            self.tokens.append(IdentityKey(thing))

    def _describe_attributes(self, thing: Any, attributes: dict[str, Any], depth: int) -> None:
        """Describe those of an object that code names which ran, and all if its class may read them otherwise."""
        left_out = WRITTEN_BY_SAVE & attributes.keys() if is_configuration(thing) else frozenset()
        kind: Any = type(thing)
        if tells_reads(kind):
            self.kinds.add(kind)
            if self.names is not None and self.names.named is not None:
                left_out |= attributes.keys() - self.names.named
        names, ignored = tuple(name for name in attributes if name not in left_out), tuple(left_out)
        self._read_attributes(thing, attributes, lambda found: tuple(map(found.__getitem__, names)), ignored)
        self.containers.append(attributes)
        self.tokens.append(tuple(map(_item_key, names)))
        self._describe_keys(names, depth)
        for name in names:
            self._describe_item(attributes, name, depth + 1)

    def _describe_slots(self, thing: Any, depth: int) -> None:
        if named := slots(thing):
            self._check_identities(lambda: [getattr(thing, name, None) for name in named])
            for name in named:
                self._describe_named(getattr(thing, name, None), name, depth + 1)

    def _describe_container(self, thing: Any, depth: int) -> None:
        if isinstance(thing, dict):
            self._describe_mapping(thing, depth)
            if isinstance(thing, defaultdict):
                self._check_identities(lambda: [thing.default_factory])
                self._describe_named(thing.default_factory, "default_factory", depth + 1)
        elif isinstance(thing, set | frozenset):
            if isinstance(thing, set):
                content = frozenset(thing)
                self.containers.append(thing)
                self._check(lambda: thing == content)
            self.tokens.append(frozenset(map(_item_key, thing)))
            self._describe_keys(thing, depth)
        else:
            if not isinstance(thing, tuple):
                self._keep(thing)
                self.containers.append(thing)
                self._check(lambda: tuple(map(id, thing)))
            for index, item in enumerate(thing):
                self._describe_named(item, index, depth + 1)

    def _describe_mapping(self, mapping: dict[Any, Any], depth: int) -> None:
        self._check_mapping(mapping)
        self.tokens.append(tuple(map(_item_key, mapping)))
        self._describe_keys(mapping, depth)
        for name, value in mapping.items():
            if type(mapping) is dict:
                self._describe_item(mapping, name, depth + 1)
            else:
                self._describe_named(value, name, depth + 1)

    def _describe_keys(self, keys: Iterable[Any], depth: int) -> None:
        for key in keys:
            if type(key) not in CONSTANTS:
                self.describe(key, depth + 1)

    def _check_mapping(self, mapping: dict[Any, Any]) -> None:
        self._keep(mapping.values())
        self.containers.append(mapping)
        if type(mapping) is dict and not any(isinstance(each, Tensor) for each in mapping.values()):
            self._dicts.add(mapping, _all_items)
        else:
            self._check(lambda: (tuple(mapping), tuple(map(id, mapping.values()))))

    def _check(self, read: Callable[[], object]) -> None:
        self._checks.append(Check(read, read()))

    def _check_identities(self, read: Callable[[], Iterable[Any]]) -> None:
        self._keep(read())  # so that none is at the address of another
        self._check(lambda: [*map(id, read())])

    def _keep(self, things: Iterable[Any]) -> None:
        self._alive += [thing for thing in things if not isinstance(thing, Tensor)]


def _all_items(mapping: dict[Any, Any]) -> tuple[Any, ...]:
    return *mapping, *mapping.values()


def _item_key(thing: Any) -> Hashable:
    if type(thing) in (float, complex):
        return type(thing), repr(thing)
    return (type(thing), thing) if type(thing) in CONSTANTS else IdentityKey(thing)
