"""Functions that forward calls, and what they read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .way import Settings, changing, of, prepared

NUMBER = 2
SETTINGS = Settings()


def doubling(x: Tensor) -> Tensor:
    return x * 2


def tripling(x: Tensor) -> Tensor:
    return x * 3


def reading(x: Tensor) -> Tensor:
    return x * NUMBER


@of("functions")
def _() -> Any:
    """a global that a function reads"""
    return lambda m, x: reading(x), changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """a global that a function in a partial reads"""
    bound = functools.partial(reading)
    return lambda m, x: bound(x), changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """a list that a partial holds"""
    held = [2]
    bound = functools.partial(lambda items, x: x * items[0], held)
    return lambda m, x: bound(x), lambda: held.__setitem__(0, 3)


@of("functions")
def _() -> Any:
    """a list that a partial in an attribute holds"""
    held = [2]
    bound = functools.partial(lambda items, x: x * items[0], held)
    then = prepared(lambda m, x: m.bound(x), lambda m: setattr(m, "bound", bound))
    return then, lambda: held.__setitem__(0, 3)


@of("functions")
def _() -> Any:
    """a global that a function in a list reads"""
    return lambda m, x: LISTED[0](x), changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """a function in a dict"""
    return lambda m, x: CHOSEN["a"](x), lambda: CHOSEN.update(a=tripling)


LISTED, CHOSEN = [reading], {"a": doubling}


@of("functions")
def _() -> Any:
    """a global that a function in a closure reads"""
    held = [reading]
    return lambda m, x: held[0](x), changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """an int that a function closes over"""
    scale = 2

    def change() -> None:
        nonlocal scale
        scale = 3

    return lambda m, x: x * scale, change


@of("functions")
def _() -> Any:
    """a dict that a function closes over"""
    table = {"a": 2}
    return lambda m, x: x * table["a"], lambda: table.update(a=3)


@of("functions")
def _() -> Any:
    """an object that a function closes over"""
    held = Settings()
    return lambda m, x: x * held.scale, lambda: setattr(held, "scale", 3)


@of("functions")
def _() -> Any:
    """what a decorated function closes over"""
    held = Settings()

    def decorated(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args) * held.scale

        return wrapper

    @decorated
    def then(m: Any, x: Tensor) -> Tensor:
        return x

    return then, lambda: setattr(held, "scale", 3)


@of("functions")
def _() -> Any:
    """a default that is changed in place"""

    def scaled(x: Tensor, by: list[int] = [2]) -> Tensor:  # noqa: B006
        return x * by[0]

    return lambda m, x: scaled(x), lambda: scaled.__defaults__[0].__setitem__(0, 3)  # type: ignore[index]


@of("functions")
def _() -> Any:
    """defaults that are replaced"""

    def scaled(x: Tensor, by: int = 2) -> Tensor:
        return x * by

    return lambda m, x: scaled(x), lambda: setattr(scaled, "__defaults__", (3,))


@of("functions")
def _() -> Any:
    """a default by keyword that is replaced"""

    def scaled(x: Tensor, *, by: int = 2) -> Tensor:
        return x * by

    return lambda m, x: scaled(x), lambda: dict.update(scaled.__kwdefaults__ or {}, by=3)


@of("functions")
def _() -> Any:
    """an attribute of a function"""

    def scaled(x: Tensor) -> Tensor:
        return x * scaled.by  # type: ignore[attr-defined]

    scaled.by = 2  # type: ignore[attr-defined]
    return lambda m, x: scaled(x), lambda: setattr(scaled, "by", 3)


@of("functions")
def _() -> Any:
    """code that is replaced"""

    def scaled(x: Tensor) -> Tensor:
        return x * 2

    return lambda m, x: scaled(x), lambda: setattr(scaled, "__code__", tripling.__code__)


@of("functions")
def _() -> Any:
    """a bound method, and the object's attribute"""
    held = Settings()
    method = held.doubled
    return lambda m, x: x * method(), lambda: setattr(held, "scale", 3)


@of("functions")
def _() -> Any:
    """a generator that reads a global"""

    def scales() -> Iterator[int]:
        yield NUMBER

    return lambda m, x: x * sum(scales()), changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """a comprehension that reads a global"""
    return lambda m, x: x * sum(NUMBER for _ in range(2)), changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """`map` over a function that reads a global"""
    return lambda m, x: sum(map(reading, [x, x])), changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """`functools.reduce` over a function that reads a global"""
    return lambda m, x: functools.reduce(lambda a, b: a + reading(b), [x, x]), changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """a function that forward defines"""

    def then(m: Any, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return y * NUMBER

        return inner(x)

    return then, changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """a class that forward defines"""

    def then(m: Any, x: Tensor) -> Tensor:
        class Inner:
            by = NUMBER

        return x * Inner.by

    return then, changing("NUMBER", 3)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * NUMBER

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * NUMBER


@of("functions")
def _() -> Any:
    """a global that an autograd.Function reads in forward and backward"""
    return lambda m, x: Twice.apply(x), changing("NUMBER", 3)  # type: ignore[no-untyped-call]


class BackwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * SETTINGS.scale


@of("functions")
def _() -> Any:
    """an object that an autograd.Function reads in backward alone"""
    SETTINGS.scale = 2
    return lambda m, x: BackwardOnly.apply(x), lambda: setattr(SETTINGS, "scale", 3)  # type: ignore[no-untyped-call]


@of("functions")
def _() -> Any:
    """a hook of a tensor that reads a global"""

    def then(m: Any, x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda grad: grad * NUMBER)
        return y

    return then, changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """`torch.utils.checkpoint` of a function that reads a global"""
    from torch.utils.checkpoint import checkpoint

    return lambda m, x: checkpoint(reading, x, use_reentrant=False), changing("NUMBER", 3)


@of("functions")
def _() -> Any:
    """a cache of a function (`lru_cache`) that is cleared"""
    scale = [2]

    @functools.lru_cache
    def cached() -> int:
        return scale[0]

    def change() -> None:
        scale[0] = 3
        cached.cache_clear()

    return lambda m, x: x * cached(), change


@of("functions")
def _() -> Any:
    """`functools.singledispatch`"""

    @functools.singledispatch
    def scaled(x: Any) -> Any:
        return x * 2

    return lambda m, x: scaled(x), lambda: [scaled.register(Tensor, tripling)]
