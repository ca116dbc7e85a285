"""Globals that forward reads."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .way import Settings, changing, of

NUMBER, FLAG, TEXT, NOTHING, TABLE, ITEMS, NESTED = 2, True, "ab", None, {"a": 2}, [1, 2], {"a": {"b": {"c": {"d": 2}}}}
FLOAT, TENSOR, ARRAY, PAIR, WORDS, QUEUE, FROZEN = (
    0.5, torch.ones(8), np.ones(8, dtype=np.float32), (1, 2), {"a"}, collections.deque([1, 2]), frozenset({1}),
)  # fmt: skip
ACTIVATION: Callable[[Tensor], Tensor] = torch.relu


@of("globals")
def _() -> Any:
    """an int"""
    return lambda m, x: x * NUMBER, changing("NUMBER", 3)


@of("globals")
def _() -> Any:
    """an int that decides a branch"""
    return lambda m, x: x if NUMBER == 2 else x * 5, changing("NUMBER", 3)


@of("globals")
def _() -> Any:
    """a float"""
    return lambda m, x: x * FLOAT, changing("FLOAT", 0.7)


@of("globals")
def _() -> Any:
    """a bool"""
    return lambda m, x: x if FLAG else -x, changing("FLAG", False)


@of("globals")
def _() -> Any:
    """a text"""
    return lambda m, x: x * len(TEXT), changing("TEXT", "abc")


@of("globals")
def _() -> Any:
    """None, then a number"""
    return lambda m, x: x if NOTHING is None else x * 3, changing("NOTHING", 1)


@of("globals")
def _() -> Any:
    """a tensor that is replaced"""
    return lambda m, x: x * TENSOR, changing("TENSOR", torch.arange(8.0))


@of("globals")
def _() -> Any:
    """a tensor that is changed in place"""
    TENSOR.fill_(1)
    return lambda m, x: x * TENSOR, lambda: [TENSOR.mul_(3)]


@of("globals")
def _() -> Any:
    """a NumPy array that is changed in place"""
    ARRAY[:] = 1
    return lambda m, x: x * float(ARRAY[0]), lambda: ARRAY.__setitem__(0, 3)


@of("globals")
def _() -> Any:
    """an entry of a dict"""
    TABLE["a"] = 2
    return lambda m, x: x * TABLE["a"], lambda: TABLE.update(a=3)


@of("globals")
def _() -> Any:
    """an entry of a dict, read by `get`"""
    TABLE.pop("z", None)
    return lambda m, x: x * TABLE.get("z", 1), lambda: TABLE.update(z=3)


@of("globals")
def _() -> Any:
    """an entry of a dict four deep"""
    NESTED["a"]["b"]["c"]["d"] = 2
    return lambda m, x: x * NESTED["a"]["b"]["c"]["d"], lambda: NESTED["a"]["b"]["c"].update(d=3)


@of("globals")
def _() -> Any:
    """an item of a list"""
    ITEMS[:] = [1, 2]
    return lambda m, x: x * sum(ITEMS), lambda: ITEMS.append(3)


@of("globals")
def _() -> Any:
    """a tuple"""
    return lambda m, x: x * sum(PAIR), changing("PAIR", (1, 5))


@of("globals")
def _() -> Any:
    """a set"""
    WORDS.discard("b")
    return lambda m, x: x * len(WORDS), lambda: WORDS.add("b")


@of("globals")
def _() -> Any:
    """a frozenset"""
    return lambda m, x: x * len(FROZEN), changing("FROZEN", frozenset({1, 2}))


@of("globals")
def _() -> Any:
    """a deque"""
    return lambda m, x: x * sum(QUEUE), lambda: QUEUE.append(1)


@of("globals")
def _() -> Any:
    """a function"""
    return lambda m, x: ACTIVATION(x), changing("ACTIVATION", torch.tanh)


@of("globals")
def _() -> Any:
    """a function that is a lambda with other constants"""
    return lambda m, x: SCALED(x), changing("SCALED", lambda x: x * 3)


SCALED: Callable[[Tensor], Tensor] = lambda x: x * 2  # noqa: E731


@of("globals")
def _() -> Any:
    """by `globals()` and a text"""
    return lambda m, x: x * globals()["NUM" + "BER"], changing("NUMBER", 3)


@of("globals")
def _() -> Any:
    """one that appears later, in the place of a builtin"""

    def change() -> Any:
        globals()["len"] = lambda text: 7
        return lambda: [globals().pop("len")]

    return lambda m, x: x * len("abc"), change


@of("globals")
def _() -> Any:
    """one that is missing first"""

    def then(m: Any, x: Tensor) -> Tensor:
        try:
            return x * MISSING_AT_FIRST  # type: ignore[name-defined]
        except NameError:
            return x

    def change() -> Any:
        globals()["MISSING_AT_FIRST"] = 3
        return lambda: [globals().pop("MISSING_AT_FIRST")]

    return then, change


@of("globals")
def _() -> Any:
    """a list of objects"""
    OBJECTS[0].scale = 2
    return lambda m, x: x * OBJECTS[0].scale, lambda: setattr(OBJECTS[0], "scale", 3)


OBJECTS, HELD = [Settings()], {"a": Settings()}


@of("globals")
def _() -> Any:
    """an object in a dict"""
    HELD["a"].scale = 2
    return lambda m, x: x * HELD["a"].scale, lambda: setattr(HELD["a"], "scale", 3)
