"""Numbers and arrays that forward draws with `random` or numpy, as results of ops.

    if random.random() < 0.1: ...     the comparison is an op, and its answer a guard
    torch.tensor(mask)                the array is a tensor of the step, drawn in each run

Whatever else needs the drawn float or array is refused: it would be the same in every step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...errors import CaptureError

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC = ("add", "sub", "mul", "truediv")
ROUNDINGS = {"__int__": torch.trunc, "__trunc__": torch.trunc, "__floor__": torch.floor, "__ceil__": torch.ceil}
NUMBERS = (bool, int, float)


class DrawnNumber:
    """A drawn bool, int or float; `tensor` has its value.

    Python compares it, and rounds it.  The answer is a guard.  An int may also be an index.
    """

    __slots__ = ("__weakref__", "kind", "tensor")

    def __init__(self, tensor: Tensor, kind: type) -> None:
        self.tensor, self.kind = tensor, kind

    @property  # type: ignore[misc] # so that `isinstance(coin, float)` holds, as it does in eager
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] # never set
        return self.kind

    def __bool__(self) -> bool:
        return bool(self.tensor != 0)

    def __index__(self) -> int:
        if self.kind is float:
            raise TypeError("'float' object cannot be interpreted as an integer")
        return int(self.tensor.item())

    def __float__(self) -> float:
        return _refuse("a float") if self.kind is float else float(self.tensor.item())

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("a number")

    def item(self) -> DrawnNumber:
        return self

    def __neg__(self) -> Any:
        return self.kind(0) - self

    def __repr__(self) -> str:
        return f"<a {self.kind.__name__} drawn in forward>"

    __hash__ = None  # type: ignore[assignment]


class DrawnArray:
    """A drawn array; `tensor` has its values. It becomes a tensor, or one of its numbers is taken."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.dim()

    @property
    def size(self) -> int:
        return self.tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> Any:
        return drawn(self.tensor[index]) if type(index) is int else _refuse("an array")

    def item(self) -> Any:
        return drawn(self.tensor.reshape(()))

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("an array")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse("an array")


def drawn(tensor: Tensor) -> DrawnNumber | DrawnArray:
    """Return what stands for the values of a tensor."""
    if tensor.dim():
        return DrawnArray(tensor)
    kind = bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
    return DrawnNumber(tensor, kind)


def is_drawn(value: object) -> bool:
    return type(value) in (DrawnNumber, DrawnArray)


def tensor_of(value: DrawnNumber | DrawnArray, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """Return what `torch.tensor` makes of it."""
    if dtype is None:
        dtype = torch.get_default_dtype() if isinstance(value, float) else value.tensor.dtype
    return value.tensor.to(device=device if device is not None else torch.get_default_device(), dtype=dtype, copy=True)


def _refuse(what: str) -> NoReturn:
    raise CaptureError(
        f"forward draws {what} with `random` or numpy, and computes with it in Python, which a captured step can't "
        "repeat: compare it, make a tensor of it at once, or draw it with torch or outside of the module"
    )


def _comparison(name: str) -> Callable[[DrawnNumber, Any], Any]:
    def compare(self: DrawnNumber, other: Any) -> Any:
        if type(other) is not DrawnNumber and type(other) not in NUMBERS:
            return NotImplemented
        return bool(getattr(torch, name)(self.tensor, other.tensor if type(other) is DrawnNumber else other))

    return compare


def _arithmetic(name: str, reflected: bool = False) -> Callable[[DrawnNumber, Any], Any]:
    """Return the method that computes in double precision, as Python does."""
    run: Callable[[Any, Any], Any] = getattr(operator, name)

    def compute(self: DrawnNumber, other: Any) -> Any:
        is_number = type(other) in NUMBERS or type(other) is DrawnNumber
        if self.kind is not float or not is_number or (name == "truediv" and (reflected or not other)):
            return NotImplemented
        value = other.tensor if type(other) is DrawnNumber else float(other)
        return DrawnNumber(run(value, self.tensor) if reflected else run(self.tensor, value), float)

    return compute


def _rounding(round_down: Callable[[Tensor], Tensor]) -> Callable[[DrawnNumber], int]:
    def compute(self: DrawnNumber) -> int:
        return int(round_down(self.tensor).to(torch.int64).item())

    return compute


for _name in COMPARISONS:
    setattr(DrawnNumber, f"__{_name}__", _comparison(_name))
for _name in ARITHMETIC:
    setattr(DrawnNumber, f"__{_name}__", _arithmetic(_name))
    setattr(DrawnNumber, f"__r{_name}__", _arithmetic(_name, reflected=True))
for _name, _round in ROUNDINGS.items():
    setattr(DrawnNumber, _name, _rounding(_round))
