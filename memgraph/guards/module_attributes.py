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
from collections.abc import Hashable, Iterable, Mapping, Set
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..system.own_attributes import attributes_of
from .checks import Checks, items_of
from .contents import (
    NAMESPACES,
    STATES,
    IdentityKey,
    all_items,
    array_content,
    constant_key,
    container_of,
    holds_objects,
    inside_of,
    is_array,
    is_weak,
    mutable_layout,
    plain_items,
    referents_of,
    slots,
    state_contents,
    value_of,
)  # fmt: skip
from .module_proxy import ModuleProxy
from .packages import is_configuration, is_from_torch, tells_reads
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


class AttributeWalk:
    """The tokens of one walk, with a path for each, and the checks that tell whether another would give the same.

    `inputs` maps the id of a tensor to its position. Such a tensor is described by position, not by identity.
    `ignored` are attributes, by the id of their module and name, that are not described.
    `owned` has the modules whose parameters and buffers the key of a call has: their paths, by ids; None for all.
    `names` has the attributes of these modules that are described; None for all.
    """

    max_depth = MAX_DEPTH

    def __init__(
        self, inputs: Mapping[int, int] | None = None, ignored: Set[tuple[int, str]] = frozenset(),
        owned: Mapping[int, str] | None = None, names: Names | None = None,
    ) -> None:  # fmt: skip
        self.inputs, self.ignored, self.owned, self.names = inputs or {}, ignored, owned, names
        self.tokens: list[Hashable] = []
        self.numbers: dict[int, int] = {}  # id -> number, for things that were described before
        self.containers: list[Any] = []
        self.in_dicts: dict[int, tuple[Any, Any]] = {}  # token of a number or a tensor -> its dict, and its key there
        self._labels: list[tuple[int, Label]] = []  # by the first token of each named thing
        self._label: Label | None = None
        self.states: list[dict[str, Any]] = []  # the parameters and buffers of each submodule that has some
        self.checks = Checks()
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
        return self.checks.fail()

    def describe(self, thing: Any, depth: int) -> None:
        """Append the tokens of a thing and of its contents."""
        kind = type(thing)
        if kind in CONSTANTS:
            self.tokens.append(constant_key(thing))
        elif id(thing) in self.numbers:
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
            self.checks.add_empty(values)
            self.tokens.append(0)
            return
        if by_identity:
            self._check_mapping(values)
            self.tokens.append(tuple(map(IdentityKey, values.values())))
        else:
            self.containers.append(values)
            self.states.append(values)
            self.checks.dicts.add(values, tuple)  # the names
            self.tokens.append(tuple(values))

    def _describe_new(self, thing: Any, depth: int) -> None:
        if is_weak(thing):
            self.checks.keep([thing])
            self.checks.add(lambda: self._behind(thing, depth))
            self.tokens += [IdentityKey(type(thing)), self._behind(thing, depth)]
            self._describe_own(thing, depth)
            return
        if isinstance(thing, Tensor):
            self._describe_tensor(thing)
            return
        self.checks.keep([thing])
        if isinstance(thing, nn.Module):
            self._describe_module(thing, depth)
        elif is_array(thing) and not holds_objects(thing):
            self.checks.add(lambda: array_content(thing))
            self.tokens += [IdentityKey(type(thing)), array_content(thing)]
            self._describe_own(thing, depth)
        elif (read := STATES.get(type(thing))) is not None:
            self.checks.add_identities(lambda: state_contents(read(thing)))
            self.tokens.append(IdentityKey(thing))
            self.describe(read(thing), depth + 1)
        elif inside := inside_of(thing):
            self.checks.add_identities(lambda: inside_of(thing))
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
            self.checks.add(lambda: reference() is None)
            self.tokens.append(("input", self.inputs[id(tensor)]))
        else:
            self.checks.add(lambda: mutable_layout(reference()))
            self.tokens += [IdentityKey(tensor), mutable_layout(tensor)]

    def _behind(self, thing: Any, depth: int) -> tuple[Hashable, ...]:
        """Return the tokens of what a weak reference leads to, which nothing may keep alive."""
        walk = AttributeWalk(self.inputs, self.ignored, self.owned, self.names)
        walk.numbers |= dict.fromkeys(self.owned or (), 0)
        for each in referents_of(thing):
            kind: Any = type(each)  # another one counts by identity: nothing tells what is read of it
            is_open = kind in (*CONSTANTS, types.FunctionType, *NAMESPACES) or tells_reads(kind)
            is_open = is_open or is_array(each) or (container_of(each) is not None and not tells_reads(kind))
            walk.describe(each, depth + 1) if is_open else walk.tokens.append(IdentityKey(each))
        self.kinds |= walk.kinds
        return tuple(walk.tokens)

    def _describe_own(self, thing: Any, depth: int) -> None:
        """Describe the attributes of a thing that is described otherwise."""
        if attributes := attributes_of(thing):
            self._describe_attributes(thing, attributes, depth)

    def _describe_module(self, module: nn.Module, depth: int) -> None:
        attributes, is_owned = vars(module), self.owned is None or id(module) in self.owned
        # What a proxy has is read by the code of this package, which is not noted.
        wanted = self.names if is_owned and not issubclass(type(module), ModuleProxy) else None
        path = self.owned[id(module)] if self.owned is not None and is_owned else ""
        names, ignored = self._divided(module, attributes, wanted, path)
        if wanted is not None and wanted.known:  # the other walk has the rest
            self._describe_more(module, attributes, names, ignored)
            return
        read = items_of((*names, *(name for name in (*STATE, *HOOKS) if name in attributes)))
        self.checks.add_attributes(module, attributes, read, ignored)
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
        self.checks.add_attributes(module, attributes, items_of(names), ignored)
        self.tokens.append(names)
        for name in names:
            self._describe_item(attributes, name, 1)
        self._describe_children(attributes["_modules"])

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
            self.checks.add_empty(children)
            return
        self._check_mapping(children)
        self.tokens.append(tuple(children))
        for name, module in children.items():
            self._describe_named(module, name, 0)

    def _describe_object(self, thing: Any, depth: int) -> None:
        """A container, an object with attributes, or both."""
        kind, base = type(thing), container_of(thing)
        most = thing.maxlen if base is deque else 0
        self.tokens.append((IdentityKey(kind), *((base.__len__(thing), most) if base is not None else ())))
        if base is not None:
            self._describe_container(thing, base, depth)
        elif (plain := value_of(thing)) is not None:  # of a number or a text of one's own class
            self.tokens.append(constant_key(plain))
        if (attributes := attributes_of(thing)) is not None:
            self._describe_attributes(thing, attributes, depth)
        self._describe_slots(thing, depth)
        if base is None and not slots(thing) and attributes is None:
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
        self.checks.add_attributes(thing, attributes, items_of(names), ignored)
        self.containers.append(attributes)
        self.tokens.append(tuple(map(_item_key, names)))
        self._describe_keys(names, depth)
        for name in names:
            self._describe_item(attributes, name, depth + 1)

    def _describe_slots(self, thing: Any, depth: int) -> None:
        if named := slots(thing):
            self.checks.add_identities(lambda: [getattr(thing, name, None) for name in named])
            for name in named:
                self._describe_named(getattr(thing, name, None), name, depth + 1)

    def _describe_container(self, thing: Any, base: Any, depth: int) -> None:
        """Describe the entries, which a class may show otherwise."""
        if issubclass(base, dict):
            self._describe_mapping(thing, depth)
            if base is defaultdict:
                self.checks.add_identities(lambda: [thing.default_factory])
                self._describe_named(thing.default_factory, "default_factory", depth + 1)
        elif base in (set, frozenset):
            content = frozenset(base.__iter__(thing))
            if base is set:
                self.containers.append(thing)
                if content or type(thing) is not set:
                    self.checks.add(lambda: frozenset(set.__iter__(thing)) == content)
                else:
                    self.checks.add_empty(thing)
            self.tokens.append(frozenset(map(_item_key, content)))
            self._describe_keys(content, depth)
        else:
            if base is not tuple:
                self.containers.append(thing)
                if type(thing) is list:
                    self.checks.add_list(thing)
                else:
                    self.checks.add_identities(lambda: base.__iter__(thing))
            for index, item in enumerate(base.__iter__(thing)):
                self._describe_named(item, index, depth + 1)

    def _describe_mapping(self, mapping: dict[Any, Any], depth: int) -> None:
        self._check_mapping(mapping)
        items = all_items(mapping)
        self.tokens.append(tuple(_item_key(key) for key, _ in items))
        self._describe_keys([key for key, _ in items], depth)
        for name, value in items:
            if type(mapping) is dict:
                self._describe_item(mapping, name, depth + 1)
            else:
                self._describe_named(value, name, depth + 1)

    def _describe_keys(self, keys: Iterable[Any], depth: int) -> None:
        for key in keys:
            if type(key) not in CONSTANTS:
                self.describe(key, depth + 1)

    def _check_mapping(self, mapping: dict[Any, Any]) -> None:
        values = [value for _, value in all_items(mapping)]
        self.checks.keep(values)
        self.containers.append(mapping)
        if type(mapping) is dict and not any(isinstance(each, Tensor) for each in values):
            self.checks.dicts.add(mapping, plain_items)
        else:
            self.checks.add(lambda: tuple((key, id(value)) for key, value in all_items(mapping)))


def _item_key(thing: Any) -> Hashable:
    return constant_key(thing) if type(thing) in CONSTANTS else IdentityKey(thing)
