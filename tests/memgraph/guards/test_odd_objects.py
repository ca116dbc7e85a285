"""Classes of objects and containers, and numbers of one's own classes, wherever a module has them."""

from __future__ import annotations

import argparse
import collections
import contextvars
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memgraph

X = torch.ones(2, 3)
CV: contextvars.ContextVar[Any] = contextvars.ContextVar("of_odd_objects")


class Net(nn.Module):
    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.held, self.read = nn.Linear(3, 3), held, read

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) * self.read(self.held)
        return found


def is_seen(held: Any, read: Callable[[Any], Any], change: Callable[[Any], Any]) -> None:
    net = Net(held, read)
    model: Any = memgraph.compile(net, 1 << 30, time_limit=0)
    assert torch.equal(model(X), net(X))
    before = net(X)
    change(net)
    assert torch.equal(model(X), net(X)) and not torch.equal(net(X), before)


class Settings:
    scale = 2

    def get(self) -> Any:
        return self.inside.scale  # type: ignore[attr-defined]


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class OwnInt(int): ...


class OwnFloat(float): ...


class OwnComplex(complex): ...


class OwnStr(str):
    __slots__ = ()


class OwnBytes(bytes): ...


SETTINGS = Settings()
CV.set(SETTINGS)
HOMES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a slot": (Slotted(SETTINGS), lambda held: held.held),
    "a class in a slot": (Slotted(Settings), lambda held: held.held),
    "a reference": (weakref.ref(SETTINGS), lambda held: held()),
    "a proxy": (weakref.proxy(SETTINGS), lambda held: held),
    "a weak dict": (weakref.WeakValueDictionary(k=SETTINGS), lambda held: held["k"]),
    "a view of a dict": (types.MappingProxyType({"k": SETTINGS}), lambda held: held["k"]),
    "an array": (np.array([SETTINGS], dtype=object), lambda held: held[0]),
    "an error": (ValueError(SETTINGS), lambda held: held.args[0]),
    "a cell": (types.CellType(SETTINGS), lambda held: held.cell_contents),
    "a context variable": (None, lambda held: CV.get()),
}


@pytest.mark.parametrize("home", HOMES)
def test_the_class_of_an_object(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, take = HOMES[home]
    is_seen(held, lambda held: take(held).scale, lambda net: monkeypatch.setattr(Settings, "scale", 5))


def setattr_of(thing: Any, net: nn.Module) -> None:
    thing.scale = 9


def test_what_a_bound_method_reads() -> None:
    hold: Any
    take: Callable[[Any], Any]
    for hold, take in (
        (Slotted, lambda held: held.held()),
        (lambda method: types.MappingProxyType({"f": method}), lambda held: held["f"]()),
    ):
        settings: Any = Settings()
        settings.inside = types.SimpleNamespace(scale=2)
        is_seen(hold(settings.get), take, partial(setattr_of, settings.inside))


NAMESPACE = argparse.Namespace(scale=2)
MAPPING = collections.OrderedDict(scale=2)
DEQUE = collections.deque([2])
USER = collections.UserDict(scale=2)
ARRAY = np.array([2.0])
BEHIND: dict[str, tuple[Any, Callable[[Any], Any], Callable[[], Any]]] = {
    "a namespace": (NAMESPACE, lambda found: found.scale, lambda: setattr(NAMESPACE, "scale", 9)),
    "an ordered dict": (MAPPING, lambda found: found["scale"], lambda: MAPPING.update(scale=9)),
    "a deque": (DEQUE, lambda found: found[0], lambda: DEQUE.append(DEQUE.pop() + 1)),
    "a user's dict": (USER, lambda found: found["scale"], lambda: USER.update(scale=9)),
    "an array": (ARRAY, lambda found: float(found[0]), lambda: ARRAY.__setitem__(0, 9.0)),
}


@pytest.mark.parametrize("what", BEHIND)
def test_what_a_weak_reference_leads_to(what: str) -> None:
    thing, read, change = BEHIND[what]
    is_seen([weakref.ref(thing)], lambda held: read(held[0]()), lambda net: change())


@pytest.mark.parametrize(
    ("value", "read", "other"),
    [
        (OwnInt(2), lambda held: held + 0, OwnInt(9)),
        (OwnFloat(2.5), lambda held: held * 1.0, OwnFloat(9.5)),
        (OwnComplex(2 + 1j), lambda held: held.real, OwnComplex(5 + 1j)),
        (OwnStr("relu"), lambda held: 2 if held == "relu" else 3, OwnStr("tanh")),
        (OwnBytes(b"a"), lambda held: 2 if held == b"a" else 3, OwnBytes(b"c")),
    ],
    ids=["int", "float", "complex", "str", "bytes"],
)
def test_numbers_and_texts_of_ones_own_class(value: Any, read: Callable[[Any], Any], other: Any) -> None:
    is_seen(value, read, lambda net: setattr(net, "held", other))
    is_seen([value], lambda held: read(held[0]), lambda net: net.held.__setitem__(0, other))
    is_seen({"k": value}, lambda held: read(held["k"]), lambda net: net.held.update(k=other))


def test_containers_that_show_other_entries_than_they_have() -> None:
    class Reversed(list[int]):
        def __iter__(self) -> Any:
            return iter([1])

    class Showing(dict[str, int]):
        def values(self) -> Any:
            return [1]

        def items(self) -> Any:
            return [("a", 1)]

    is_seen(Reversed([1, 2]), lambda held: held[1], lambda net: net.held.__setitem__(1, 9))
    is_seen(Showing(a=1, b=2), lambda held: held["b"], lambda net: net.held.update(b=9))


def test_an_object_that_passes_for_a_dict_is_no_container() -> None:
    class Passing:
        def __init__(self, inside: Any) -> None:
            object.__setattr__(self, "inside", inside)

        def __getattribute__(self, name: str) -> Any:
            return getattr(object.__getattribute__(self, "inside"), name)

        __class__ = property(lambda self: dict)

    net = Net(Passing({"a": 1}), lambda held: 2)
    assert torch.equal(memgraph.compile(net, 1 << 30, time_limit=0)(X), net(X))
