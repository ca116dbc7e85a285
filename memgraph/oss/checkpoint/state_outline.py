"""Split a state value into an outline, which is written as JSON, and its tensors.

    {"step": 3.0, "exp_avg": f32[7]}   <->   {"dict": [["step", 3.0], ["exp_avg", {"tensor": ["float32", [7], [1]]}]]}
                                             and [f32[7]]

So states are sent between ranks without pickles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import StateError

Outline = Any  # JSON


@dataclass(frozen=True)
class Kind:
    """Dtype, shape and strides of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


def outline(value: object, where: str) -> Outline:
    if isinstance(value, Tensor):
        strides = torch.empty_like(value, device="meta").stride()  # those of a copy, if it has gaps
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), list(strides)]}
    if isinstance(value, dict):
        return {"dict": [[outline(key, where), outline(each, where)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [outline(each, where) for each in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    message = f"the state of {where} has a {type(value).__name__} in it, which can't be sent to another rank"
    raise StateError(f"{message}; sent are tensors, numbers, texts, None, and lists, tuples and dicts of them")


def fill_outline(given: Outline, tensors: Iterator[Tensor]) -> Any:
    if not isinstance(given, dict):
        return given
    ((kind, inner),) = given.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {fill_outline(key, tensors): fill_outline(each, tensors) for key, each in inner}
    return (list if kind == "list" else tuple)(fill_outline(each, tensors) for each in inner)


def kinds(given: Outline) -> Iterator[Kind]:
    """Yield the kinds of the tensors in an outline, in order."""
    if isinstance(given, dict):
        ((kind, inner),) = given.items()
        if kind == "tensor":
            dtype, shape, strides = inner
            yield Kind(getattr(torch, dtype), tuple(shape), tuple(strides))
        else:
            for each in inner:
                yield from kinds(each[1] if kind == "dict" else each)


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors(each)
