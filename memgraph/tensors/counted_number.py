"""A stand-in for a number of a module with which forward counts, and the formula that it becomes.

    self.calls += 1           ->   Formula(calls + 1)
    x * self.calls            ->   an error: the graph depends on the number

It knows sums, differences and products, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from .expressions import Operation, Part, evaluate, variables

ARITHMETIC = ("add", "sub", "mul")
OBJECT = frozenset({
    "__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__setattr__",
    "__delattr__", "__dir__", "__sizeof__",
})  # fmt: skip


@dataclass(frozen=True)
class Formula:
    """A number that is computed from numbers in attributes; its variables are these attributes."""

    part: Part

    @property
    def value(self) -> Any:
        """Its value now."""
        return evaluate(self.part, {attribute: attribute.value for attribute in variables(self.part)})


class NumberNeededError(Exception):
    """Forward needs the value."""


class CountedNumber:
    """Stands for an int or a float of a module."""

    __slots__ = ("__weakref__", "formula", "kind")

    def __init__(self, formula: Part, kind: type) -> None:
        self.formula, self.kind = formula, kind

    @property  # type: ignore[misc] # so that `isinstance(self.calls, int)` holds, as it does in eager
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] # never set
        return self.kind


def formula_of(value: Any) -> Part:
    """Return the formula of a stand-in, or a plain number.

    Raises:
        NumberNeededError: it is neither.
    """
    if type(value) is CountedNumber:
        return value.formula
    if type(value) is int or type(value) is float:
        return value
    raise NumberNeededError(f"a {type(value).__name__} takes its place")


def _arithmetic(name: str, reflected: bool = False) -> Callable[[CountedNumber, Any], CountedNumber]:
    def compute(self: CountedNumber, other: Any) -> CountedNumber:
        operands = (other, self) if reflected else (self, other)
        kind = int if self.kind is int and other.__class__ is int else float
        return CountedNumber(Operation(name, tuple(map(formula_of, operands))), kind)

    return compute


def _needs_value(name: str) -> Callable[..., NoReturn]:
    def refuse(self: CountedNumber, *rest: object) -> NoReturn:
        raise NumberNeededError(f"Python asks for {name}")

    return refuse


for _name in {*dir(float), *dir(int)} - OBJECT:
    setattr(CountedNumber, _name, _needs_value(_name))
for _name in ARITHMETIC:
    setattr(CountedNumber, f"__{_name}__", _arithmetic(_name))
    setattr(CountedNumber, f"__r{_name}__", _arithmetic(_name, reflected=True))
