"""What forward may read of a module besides its tensors: attributes, containers and objects in them, and hooks.

    self.scale, self.config.act, self.tables["x"]   ->   a key that is equal as long as these are

Everything is walked once, into a key and a list of what to look at. Later calls only compare which objects lie where,
and walk again if one of them is another.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

DEPTH = 5  # so deep below a module objects are opened; further down they are equal only to themselves
CONTENT = 1 << 20  # bytes of an array that are compared
ATOMS = (
    bool, int, float, complex, str, bytes, range, types.NoneType, types.EllipsisType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
WHOLE = (
    type, enum.Enum, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
    functools.partial, torch.Generator, torch.SymFloat,
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
)  # fmt: skip
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STATE = ("_parameters", "_buffers")
# What transformers' `save_pretrained` writes into a configuration: of what class the model was, and of what dtype.
SAVED = frozenset({"architectures", "dtype"})
# Of what torch itself puts on every module, the rest says nothing about what forward does.
UNREAD = frozenset(vars(nn.Module())) - {"training", "_modules"}


class IdentityKey:
    """Stands for an object in a key: equal for that object only, and not for a later one at its address."""

    def __init__(self, thing: Any) -> None:
        self.number = id(thing)
        try:
            self.held: Callable[[], Any] = weakref.ref(thing)  # a key shall keep no tensor alive
        except TypeError:
            self.held = lambda: thing

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, IdentityKey) and (mine := self.held()) is not None and mine is other.held()
        )

    def __repr__(self) -> str:
        return f"Same({self.held()!r:.60})"


class AttributeGuard:
    """The Python side of a module; `key` is what a captured graph depends on."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._walk: AttributeWalk | None = None

    @property
    def key(self) -> Hashable:
        if self._walk is None or self._walk.is_stale():
            self._walk = AttributeWalk()
            self._walk.describe(self.module, 0)
        return self._walk.key

    @property
    def floats(self) -> dict[int, tuple[Any, Any]]:
        """For each float in the latest key, by its index there: the dict that contains it, and its key in that dict."""
        return self._walk.floats if self._walk is not None else {}


class AttributeWalk:
    """One walk, and what has to be looked at to know whether another would find the same.

    `inputs` are the places of tensors, by their id, that count by these and not by who they are.
    """

    def __init__(self, inputs: Mapping[int, int] | None = None) -> None:
        self.inputs = inputs or {}
        self.tokens: list[Hashable] = []
        self.numbers: dict[int, int] = {}  # of each thing, by its id; a second way to it says only that
        self.kept: list[Any] = []  # so that no id is used again
        self.lent: list[weakref.ref[Any]] = []  # the same for tensors, which are not to be kept alive
        self.empty: list[Any] = []
        self.named: list[tuple[dict[str, Any], int, Callable[[Any], tuple[Any, ...]], tuple[int, ...]]] = []
        self.listed: list[tuple[Iterable[Any], tuple[int, ...]]] = []
        self.mapped: list[tuple[Mapping[Any, Any], tuple[Any, ...], tuple[int, ...] | None]] = []
        self.sets: list[tuple[set[Any], frozenset[Any]]] = []
        self.arrays: list[tuple[Any, Hashable]] = []
        self.slotted: list[tuple[Any, tuple[str, ...], tuple[int, ...]]] = []
        self.floats: dict[int, tuple[Any, Any]] = {}  # by index in the key: its dict, and its key there

    @functools.cached_property
    def key(self) -> Hashable:
        """All that was found."""
        return tuple(self.tokens)

    def is_stale(self) -> bool:
        """Whether anything that was found lies elsewhere now, or has other contents."""
        if any(self.empty):
            return True
        try:
            for held, count, get, ids in self.named:
                if len(held) != count or tuple(map(id, get(held))) != ids:
                    return True
        except KeyError:
            return True
        return self._is_stale_inside()

    def _is_stale_inside(self) -> bool:
        return (
            any(tuple(map(id, things)) != ids for things, ids in self.listed)
            or any(
                tuple(held) != keys or (ids is not None and tuple(map(id, held.values())) != ids)
                for held, keys, ids in self.mapped
            )
            or any(held != before for held, before in self.sets)
            or any(_content(array) != before for array, before in self.arrays)
            or any(_slot_ids(thing, names) != ids for thing, names, ids in self.slotted)
            or any(ref() is None for ref in self.lent)
        )

    def describe(self, thing: Any, depth: int) -> None:
        """Note a thing, so deep below a module, and what is in it."""
        kind = type(thing)
        if kind in ATOMS:
            # 0.0 == -0.0, nan != nan, and 1 == True.
            self.tokens.append((kind, repr(thing) if kind in (float, complex) else thing))
        elif id(thing) in self.numbers:
            self.tokens.append(("again", self.numbers[id(thing)]))
        else:
            self.numbers[id(thing)] = len(self.numbers)
            self._open(thing, depth)

    def _open(self, thing: Any, depth: int) -> None:
        if isinstance(thing, Tensor):
            # The graph reads the tensor itself, whatever it holds by then.
            self.lent.append(weakref.ref(thing))
            if id(thing) in self.inputs:
                self.tokens.append(("input", self.inputs[id(thing)]))
                return
            self.tokens += [IdentityKey(thing), (tuple(thing.shape), thing.stride(), thing.dtype, thing.requires_grad)]
            return
        self.kept.append(thing)
        if isinstance(thing, nn.Module):
            self._open_module(thing, depth)
        elif _is_array(thing):
            self.arrays.append((thing, _content(thing)))
            self.tokens += [IdentityKey(type(thing)), self.arrays[-1][1]]
        elif depth >= DEPTH or isinstance(thing, WHOLE) or _is_torchs(thing):
            self.tokens.append(IdentityKey(thing))
        else:
            self._open_object(thing, depth)

    def _open_module(self, module: nn.Module, depth: int) -> None:
        held = vars(module)
        names = tuple(name for name in held if name not in UNREAD)
        self._note(held, (*names, *(name for name in (*STATE, *HOOKS) if name in held)))
        self.tokens += [IdentityKey(type(module)), names]
        for name in (*STATE, *HOOKS):
            self.open_state(held.get(name), hooks=name in HOOKS)
        for name in names:
            # Submodules are as deep as the module itself: their own attributes count from there.
            self._describe_modules(held[name]) if name == "_modules" else self._describe_entry(held, name, depth + 1)

    def _describe_entry(self, held: dict[Any, Any], name: Any, depth: int) -> None:
        """Describe an entry of a dict, and note where a float is."""
        if type(held[name]) is float:
            self.floats[len(self.tokens)] = held, name
        self.describe(held[name], depth)

    def open_state(self, held: dict[Any, Any] | None, hooks: bool) -> None:
        """Hooks count by who they are; parameters and buffers by name, for their tensors are in the key already."""
        if not held:
            self.empty.append(held)
            self.tokens.append(0)
            return
        values = tuple(held.values()) if hooks else ()
        self.kept += values
        self.mapped.append((held, tuple(held), tuple(map(id, values)) if hooks else None))
        self.tokens.append(tuple(map(IdentityKey, values)) if hooks else tuple(held))

    def _describe_modules(self, held: dict[str, nn.Module | None]) -> None:
        if not held:
            self.empty.append(held)
        else:
            self.mapped.append((held, tuple(held), tuple(map(id, held.values()))))
            self.tokens.append(tuple(held))
            for module in held.values():
                self.describe(module, 0)

    def _note(self, held: dict[str, Any], names: tuple[str, ...]) -> None:
        get = itemgetter(*names)
        found = get(held)
        self.kept += [thing for thing in found if not isinstance(thing, Tensor)]
        self.named.append((held, len(held), get, tuple(map(id, found))))

    def _open_object(self, thing: Any, depth: int) -> None:
        """A container, or any object that has attributes; both, if it is both."""
        kind: Any = type(thing)
        inside = isinstance(thing, dict | list | tuple | deque | set | frozenset)
        self.tokens.append((IdentityKey(kind), len(thing)) if inside else IdentityKey(kind))
        if isinstance(thing, dict):
            self._open_mapping(thing, depth)
        elif isinstance(thing, set | frozenset):
            if isinstance(thing, set):
                self.sets.append((thing, frozenset(thing)))
            self.tokens.append(frozenset(map(_hashed, thing)))
        elif inside:
            if not isinstance(thing, tuple):
                self.listed.append((thing, self._ids(thing)))
            for item in thing:
                self.describe(item, depth + 1)
        held, slots = getattr(thing, "__dict__", None), _slots(kind)
        if isinstance(held, dict):
            self._open_mapping(held, depth, SAVED if _is_configuration(thing) else frozenset())
        if slots:
            self.slotted.append((thing, slots, _slot_ids(thing, slots)))
            for name in slots:
                self.describe(getattr(thing, name, None), depth + 1)
        if not inside and held is None and not slots:
            self.tokens.append(IdentityKey(thing))

    def _open_mapping(self, held: dict[Any, Any], depth: int, unread: Set[str] = frozenset()) -> None:
        self.mapped.append((held, tuple(held), self._ids(held.values())))
        self.tokens.append(tuple(map(_hashed, held)))
        for name, value in held.items():
            if name not in unread:
                self._describe_entry(held, name, depth + 1) if type(held) is dict else self.describe(value, depth + 1)

    def _ids(self, things: Iterable[Any]) -> tuple[int, ...]:
        things = tuple(things)
        self.kept += [thing for thing in things if not isinstance(thing, Tensor)]
        return tuple(map(id, things))


def _hashed(thing: Any) -> Hashable:
    return (type(thing), thing) if type(thing) in ATOMS else IdentityKey(thing)


def _is_configuration(thing: Any) -> bool:
    """Whether it is what describes a model of transformers."""
    kind = getattr(sys.modules.get("transformers.configuration_utils"), "PretrainedConfig", ())
    return isinstance(thing, kind)


def _is_array(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, numpy.ndarray | numpy.generic)


def _content(array: Any) -> Hashable:
    """What an array holds, or who it is, if that is much."""
    bulk = array.nbytes > CONTENT or array.dtype.hasobject
    return array.shape, str(array.dtype), IdentityKey(array) if bulk else array.tobytes()


def _is_torchs(thing: Any) -> bool:
    """Optimizers, handles of hooks, process groups: their insides change, and forward does not read them."""
    return type(thing).__module__.partition(".")[0] == "torch"


@functools.lru_cache(4096)
def _slots(kind: Any) -> tuple[str, ...]:
    """The attributes that objects of a class written in Python keep elsewhere than in a dictionary."""
    named = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in named for name in ((slots,) if isinstance(slots, str) else tuple(slots))]
    return tuple(name for name in names if not name.startswith("__") and hasattr(kind, name))


def _slot_ids(thing: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(id(getattr(thing, name, None)) for name in names)
