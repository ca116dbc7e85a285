"""Attributes of the module and of its parts."""

from __future__ import annotations

import collections
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .of_objects import Mode
from .way import Called, Settings, Slotted, Then, of, on_module, prepared


def attribute(value: Callable[[], Any], read: Then, change: Callable[[Any], Any]) -> Any:
    return prepared(read, lambda m: setattr(m, "held", value())), on_module(change)


@of("attributes")
def _() -> Any:
    """an int"""
    return attribute(lambda: 2, lambda m, x: x * m.held, lambda m: setattr(m, "held", 3))


@of("attributes")
def _() -> Any:
    """a float"""
    return attribute(lambda: 0.5, lambda m, x: x * m.held, lambda m: setattr(m, "held", 0.7))


@of("attributes")
def _() -> Any:
    """a tensor that is no buffer, replaced"""
    return attribute(lambda: torch.ones(8), lambda m, x: x * m.held, lambda m: setattr(m, "held", torch.arange(8.0)))


@of("attributes")
def _() -> Any:
    """an attribute that is deleted"""
    return attribute(lambda: 2, lambda m, x: x * getattr(m, "held", 5), lambda m: delattr(m, "held"))


@of("attributes")
def _() -> Any:
    """a dict four deep"""
    return attribute(
        lambda: {"a": {"b": {"c": 2}}}, lambda m, x: x * m.held["a"]["b"]["c"],
        lambda m: m.held["a"]["b"].update(c=3),
    )  # fmt: skip


@of("attributes")
def _() -> Any:
    """a list of objects"""
    return attribute(
        lambda: [Settings()], lambda m, x: x * m.held[0].scale, lambda m: setattr(m.held[0], "scale", 3)
    )  # fmt: skip


@of("attributes")
def _() -> Any:
    """slots"""
    return attribute(Slotted, lambda m, x: x * m.held.scale, lambda m: setattr(m.held, "scale", 3))


@of("attributes")
def _() -> Any:
    """a class attribute of an object"""

    def change() -> Callable[[], None]:
        Called.scale = 5
        return lambda: setattr(Called, "scale", 2)

    return prepared(lambda m, x: x * m.held.scale, lambda m: setattr(m, "held", Called())), change


@of("attributes")
def _() -> Any:
    """a NumPy array"""
    return attribute(lambda: np.ones(1), lambda m, x: x * float(m.held[0]), lambda m: m.held.fill(3))


@of("attributes")
def _() -> Any:
    """an enum"""
    return attribute(lambda: Mode.ONE, lambda m, x: x * m.held.value, lambda m: setattr(m, "held", Mode.TWO))


@of("attributes")
def _() -> Any:
    """a deque"""
    return attribute(lambda: collections.deque([1]), lambda m, x: x * sum(m.held), lambda m: m.held.append(2))


@of("attributes")
def _() -> Any:
    """a mapping that can't be changed through itself"""
    inside = {"a": 2}
    return attribute(lambda: types.MappingProxyType(inside), lambda m, x: x * m.held["a"], lambda m: inside.update(a=3))


@of("attributes")
def _() -> Any:
    """a `ChainMap`"""
    inside = {"a": 2}
    return attribute(lambda: collections.ChainMap(inside), lambda m, x: x * m.held["a"], lambda m: inside.update(a=3))


@of("attributes")
def _() -> Any:
    """a `UserDict`"""
    return attribute(lambda: collections.UserDict(a=2), lambda m, x: x * m.held["a"], lambda m: m.held.update(a=3))


@of("attributes")
def _() -> Any:
    """a function that closes over a number"""

    def change(m: Any) -> None:
        by = 3
        m.held = lambda x: x * by

    by = 2
    return attribute(lambda: lambda x: x * by, lambda m, x: m.held(x), change)


@of("attributes")
def _() -> Any:
    """a bound method of another object"""
    held = Settings()
    then = prepared(lambda m, x: x * m.held(), lambda m: setattr(m, "held", held.doubled))
    return then, lambda: setattr(held, "scale", 3)


@of("attributes")
def _() -> Any:
    """by a computed name"""
    return attribute(lambda: 2, lambda m, x: x * getattr(m, "he" + "ld"), lambda m: setattr(m, "held", 3))


@of("attributes")
def _() -> Any:
    """by `__dict__`"""
    return attribute(lambda: 2, lambda m, x: x * m.__dict__["held"], lambda m: m.__dict__.update(held=3))


@of("attributes")
def _() -> Any:
    """`training`"""
    return lambda m, x: x if m.training else x * 3, on_module(lambda m: [m.eval()])


@of("attributes")
def _() -> Any:
    """a submodule that is replaced"""
    return lambda m, x: m.linear(x), on_module(lambda m: setattr(m, "linear", nn.Linear(8, 8)))


@of("attributes")
def _() -> Any:
    """the forward of a submodule, replaced in the object"""
    then = prepared(lambda m, x: m.held(x), lambda m: setattr(m, "held", nn.Linear(8, 8)))
    return then, on_module(lambda m: setattr(m.held, "forward", lambda x: x * 3))


@of("attributes")
def _() -> Any:
    """a module that is no submodule, in a list"""
    held = [nn.Linear(8, 8, bias=False)]
    then = prepared(lambda m, x: m.held[0](x), lambda m: setattr(m, "held", held))
    return then, lambda: setattr(held[0], "weight", nn.Parameter(torch.eye(8), requires_grad=False))


@of("attributes")
def _() -> Any:
    """the weight of a criterion that is no submodule"""
    criterion = nn.CrossEntropyLoss(weight=torch.ones(8))
    then = prepared(
        lambda m, x: x * m.held[0](x, torch.arange(4)), lambda m: setattr(m, "held", [criterion])
    )  # fmt: skip
    return then, lambda: setattr(criterion, "weight", torch.arange(1.0, 9.0))


@of("attributes")
def _() -> Any:
    """a buffer that is replaced"""
    then = prepared(lambda m, x: x * m.held, lambda m: m.register_buffer("held", torch.ones(8)))
    return then, on_module(lambda m: setattr(m, "held", torch.arange(8.0)))


@of("attributes")
def _() -> Any:
    """`requires_grad` of a parameter"""
    return lambda m, x: x, on_module(lambda m: [m.linear.weight.requires_grad_(False)])


@of("attributes")
def _() -> Any:
    """the rate of a dropout, in evaluation"""
    then = prepared(
        lambda m, x: F.dropout(x, m.held.p, False) * m.held.p, lambda m: setattr(m, "held", nn.Dropout(0.5))
    )
    return then, on_module(lambda m: setattr(m.held, "p", 0.25))


@of("attributes")
def _() -> Any:
    """an optimizer's learning rate"""

    def prepare(m: Any) -> None:
        m.held = torch.optim.SGD(m.parameters(), lr=0.5)

    then = prepared(lambda m, x: x * m.held.param_groups[0]["lr"], prepare)
    return then, on_module(lambda m: m.held.param_groups[0].update(lr=0.25))


TARGET = Settings()


def weak(hold: Callable[[Any], Any], read: Callable[[Any], Any]) -> Any:
    """Return a way in which an attribute leads to an object and does not keep it."""
    TARGET.scale = 2
    return attribute(lambda: hold(TARGET), lambda m, x: x * read(m.held), lambda m: setattr(TARGET, "scale", 3))


@of("attributes")
def _() -> Any:
    """what is behind a weak reference"""
    return weak(weakref.ref, lambda held: held().scale)


@of("attributes")
def _() -> Any:
    """what is behind a weak reference in a list"""
    return weak(lambda target: [weakref.ref(target)], lambda held: held[0]().scale)


@of("attributes")
def _() -> Any:
    """what is behind a `weakref.proxy`"""
    return weak(weakref.proxy, lambda held: held.scale)


@of("attributes")
def _() -> Any:
    """the object of a `weakref.WeakMethod`"""
    return weak(lambda target: weakref.WeakMethod(target.doubled), lambda held: held()())


@of("attributes")
def _() -> Any:
    """whether a tensor that is no buffer requires a gradient, in place"""
    return attribute(lambda: torch.ones(8), lambda m, x: x * m.held, lambda m: m.held.requires_grad_())


@of("attributes")
def _() -> Any:
    """the shape of a tensor that is no buffer, in place"""
    return attribute(lambda: torch.ones(8), lambda m, x: x * len(m.held), lambda m: m.held.unsqueeze_(0))


@of("attributes")
def _() -> Any:
    """the strides of a tensor that is no buffer, in place"""
    return attribute(lambda: torch.rand(4, 4), lambda m, x: m.held @ x, lambda m: m.held.t_())


class Private:
    """Has its value in a slot whose name is the class's own."""

    __slots__ = ("__value",)

    def __init__(self) -> None:
        self.__value = 2

    def get(self) -> int:
        return self.__value

    def put(self, value: int) -> None:
        self.__value = value


class Trouble(Exception):
    """Has an attribute."""

    scale: int


def noted(hold: Any, name: str = "scale") -> Any:
    """Return what an attribute may lead to, with an attribute of its own."""
    setattr(hold, name, 2)
    return hold


@of("attributes")
def _() -> Any:
    """a private slot of an object"""
    return attribute(Private, lambda m, x: x * m.held.get(), lambda m: m.held.put(3))


@of("attributes")
def _() -> Any:
    """an attribute of an exception"""
    return attribute(lambda: noted(Trouble()), lambda m, x: x * m.held.scale, lambda m: setattr(m.held, "scale", 3))


@of("attributes")
def _() -> Any:
    """an attribute of a function"""
    return attribute(lambda: noted(lambda: None), lambda m, x: x * m.held.scale, lambda m: setattr(m.held, "scale", 3))


@of("attributes")
def _() -> Any:
    """a variable of a file of Python"""
    return attribute(
        lambda: noted(types.ModuleType("settings")),
        lambda m, x: x * m.held.scale,
        lambda m: setattr(m.held, "scale", 3),
    )


@of("attributes")
def _() -> Any:
    """the `maxlen` of a deque"""
    return attribute(
        lambda: collections.deque([1], maxlen=2),
        lambda m, x: x * m.held.maxlen,
        lambda m: setattr(m, "held", collections.deque([1], maxlen=3)),
    )


@of("attributes")
def _() -> Any:
    """the strides of an array of numpy"""
    return attribute(
        lambda: np.ones(4)[:2],
        lambda m, x: x * m.held.strides[0],
        lambda m: setattr(m, "held", np.ones(4)[::2]),
    )


@of("attributes")
def _() -> Any:
    """-0.0 as a key of a dict"""
    return attribute(
        lambda: {0.0: 1},
        lambda m, x: x * (2 + math.copysign(1, next(iter(m.held)))),
        lambda m: setattr(m, "held", {-0.0: 1}),
    )


@of("attributes")
def _() -> Any:
    """an object behind a weak reference that dies"""
    kept = [Settings()]
    return attribute(
        lambda: weakref.ref(kept[0]), lambda m, x: x if m.held() is None else x * 2, lambda m: kept.clear()
    )


@of("attributes")
def _() -> Any:
    """another method behind a `weakref.WeakMethod`"""
    return attribute(
        lambda: weakref.WeakMethod(TARGET.doubled),
        lambda m, x: x * m.held()(),
        lambda m: setattr(m, "held", weakref.WeakMethod(TARGET.quadrupled)),
    )


@of("attributes")
def _() -> Any:
    """the order of attributes, in a loop over `vars(self)`"""

    def read(m: Any, x: Any) -> Any:
        for name, value in vars(m).items():
            if name in ("held", "other"):
                x = x + value if name == "held" else x * value
        return x

    def put(m: Any) -> None:
        m.held, m.other = 1.0, 2.0

    return prepared(read, put), on_module(lambda m: setattr(m, "held", vars(m).pop("held")))
