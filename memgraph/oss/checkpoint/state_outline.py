"""The state of a parameter as an outline that can be written down, and the tensors in it.

    {"step": 3.0, "exp_avg": f32[7]}   <->   {"dict": [["step", 3.0], ["exp_avg", {"tensor": ["float32", [7], [1]]}]]}
                                             and [f32[7]]

Numbers, texts, None, lists, tuples and dicts go into the outline, so that nothing has to be pickled to be sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import StateError

Outline = Any  # what json can write


@dataclass(frozen=True)
class Kind:
    """What a tensor is, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def empty(self) -> Tensor:
        """One like it in host memory."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


def outline(value: object, where: str) -> Outline:
    """What a value is, with the kind of each tensor in its place.

    Raises:
        StateError: there is something else in it.
    """
    if isinstance(value, Tensor):
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _strides(value)]}
    if isinstance(value, dict):
        return {"dict": [[outline(key, where), outline(each, where)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [outline(each, where) for each in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    message = f"the state of {where} has a {type(value).__name__} in it, which can't be sent to another rank"
    raise StateError(f"{message}; sent are tensors, numbers, texts, None, and lists, tuples and dicts of them")


def fill_outline(given: Outline, tensors: Iterator[Tensor]) -> Any:
    """The value of which this is the outline, with these tensors in their places."""
    if not isinstance(given, dict):
        return given
    ((kind, inner),) = given.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {fill_outline(key, tensors): fill_outline(each, tensors) for key, each in inner}
    return (list if kind == "list" else tuple)(fill_outline(each, tensors) for each in inner)


def kinds(given: Outline) -> Iterator[Kind]:
    """The kinds of the tensors in an outline, in order."""
    if not isinstance(given, dict):
        return
    ((kind, inner),) = given.items()
    if kind == "tensor":
        dtype, shape, strides = inner
        yield Kind(getattr(torch, dtype), tuple(shape), tuple(strides))
    elif kind == "dict":
        for _, each in inner:
            yield from kinds(each)
    else:
        for each in inner:
            yield from kinds(each)


def tensors(value: object) -> Iterator[Tensor]:
    """The tensors in a value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


def _strides(tensor: Tensor) -> list[int]:
    """Its strides, or those of a copy of it where it has gaps."""
    return list(torch.empty_like(tensor, device="meta").stride())
