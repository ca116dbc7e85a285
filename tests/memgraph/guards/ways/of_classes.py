"""Attributes of classes."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .way import Host, Settings, changing, of, prepared, setting

NUMBER = 2


@of("classes")
def _() -> Any:
    """an attribute of the module's class"""
    return lambda m, x: x * m.scale, setting(Host, "scale", 3)


@of("classes")
def _() -> Any:
    """a dict of the module's class"""

    def change() -> Callable[[], None]:
        Host.factors["a"] = 3
        return lambda: Host.factors.update(a=2)

    return lambda m, x: x * m.factors["a"], change


@of("classes")
def _() -> Any:
    """an attribute of the class, by `type(self)`"""
    return lambda m, x: x * type(m).scale, setting(Host, "scale", 3)


class Base:
    by = 2


class Derived(Base):
    pass


@of("classes")
def _() -> Any:
    """an attribute of a base"""
    return lambda m, x: x * Derived.by, setting(Base, "by", 3)


@of("classes")
def _() -> Any:
    """an attribute of a class that hides its base's"""

    def change() -> Callable[[], None]:
        Derived.by = 5
        return lambda: delattr(Derived, "by")

    return lambda m, x: x * Derived.by, change


class Meta(type):
    by = 2

    @property
    def twice(cls) -> int:
        return cls.by * 2


class OfMeta(metaclass=Meta):
    pass


@of("classes")
def _() -> Any:
    """an attribute of a metaclass"""
    return lambda m, x: x * OfMeta.by, setting(Meta, "by", 3)


@of("classes")
def _() -> Any:
    """a property of a metaclass"""
    return lambda m, x: x * OfMeta.twice, setting(Meta, "by", 3)


class Descriptor:
    by = 2

    def __get__(self, owner: Any, kind: Any = None) -> int:
        return self.by


class Described:
    value = Descriptor()


DESCRIBED = Described()


@of("classes")
def _() -> Any:
    """a descriptor that reads its class"""
    return lambda m, x: x * DESCRIBED.value, setting(Descriptor, "by", 3)


@of("classes")
def _() -> Any:
    """a descriptor that is replaced"""
    return lambda m, x: x * DESCRIBED.value, lambda: setattr(Described, "value", 7)


class Cached:
    by = 2

    @functools.cached_property
    def value(self) -> int:
        return self.by


CACHED = Cached()


@of("classes")
def _() -> Any:
    """a cached property that is dropped"""
    CACHED.value  # noqa: B018

    def change() -> Callable[[], None]:
        Cached.by = 3
        vars(CACHED).pop("value", None)
        return lambda: setattr(Cached, "by", 2)

    return lambda m, x: x * CACHED.value, change


class Methods:
    by = 2

    @classmethod
    def of_class(cls) -> int:
        return cls.by

    @staticmethod
    def static() -> int:
        return NUMBER


@of("classes")
def _() -> Any:
    """a class method that reads its class"""
    return lambda m, x: x * Methods.of_class(), setting(Methods, "by", 3)


@of("classes")
def _() -> Any:
    """a static method that reads a global"""
    return lambda m, x: x * Methods.static(), changing("NUMBER", 3)


@of("classes")
def _() -> Any:
    """the class of an object, replaced"""

    class Other(Settings):
        def doubled(self) -> int:
            return 11

    held = Settings()
    return lambda m, x: x * held.doubled(), lambda: setattr(held, "__class__", Other)


@of("classes")
def _() -> Any:
    """the module's forward, replaced in its class"""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.linear(x) * 9

    return lambda m, x: x, setting(Host, "forward", forward)


@of("classes")
def _() -> Any:
    """`forward` of torch's layer, replaced in its class"""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    then = prepared(lambda m, x: m.held(x), lambda m: setattr(m, "held", Layer(8, 8)))
    return then, lambda: setattr(Layer, "forward", lambda self, x: x * 3)


@of("classes")
def _() -> Any:
    """a base that is replaced (`__bases__`)"""

    class First:
        by = 2

    class Second:
        by = 3

    class Last(First):
        pass

    return lambda m, x: x * Last.by, lambda: setattr(Last, "__bases__", (Second,))


@of("classes")
def _() -> Any:
    """a keyword of a `partialmethod`"""

    class Scaling(nn.Module):
        def scaled(self, x: Tensor, factor: int) -> Tensor:
            return x * factor

        twice = functools.partialmethod(scaled, factor=2)

    held: Any = Scaling()
    then = prepared(lambda m, x: m.held.twice(x), lambda m: setattr(m, "held", held))
    return then, lambda: vars(Scaling)["twice"].keywords.update(factor=3)


class Options:
    a = 2


def _added(kind: type, name: str, value: Any) -> Callable[[], Callable[[], None]]:
    def change() -> Callable[[], None]:
        setattr(kind, name, value)
        return lambda: delattr(kind, name)

    return change


@of("classes")
def _() -> Any:
    """an attribute that a class gets, found by a name that is computed"""
    return lambda m, x: x * getattr(Options, "l" + "ater"[:NUMBER], 2), _added(Options, "lat", 3)


@of("classes")
def _() -> Any:
    """an attribute that a class gets, found by a loop over `vars`"""
    return lambda m, x: x * sum(value for name, value in vars(Options).items() if len(name) == 1), _added(
        Options, "b", 3
    )


@of("classes")
def _() -> Any:
    """a method that the module's class gets, found by a name that is computed"""
    named = "act_"
    return (
        lambda m, x: getattr(m, named + str(NUMBER), torch.neg)(x),
        _added(Host, "act_2", lambda self, x: 3 * x),
    )  # fmt: skip


class Member(enum.Enum):
    A = 1
    B = 2

    def __init__(self, number: int) -> None:
        self.weight = number


@of("classes")
def _() -> Any:
    """a member of an enum, found by a loop"""
    return lambda m, x: x * sum(each.weight for each in Member), setting(Member.A, "weight", 5)


@of("classes")
def _() -> Any:
    """a member of an enum, found by its value"""
    return lambda m, x: x * Member(1).weight, setting(Member.A, "weight", 5)
