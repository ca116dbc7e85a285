"""Find out whether a graph depends on the numbers that forward changes on its module.

    self.calls += 1                      ->   a formula: the graph is the same for any number
    self.calls += 1; x * self.calls      ->   refused, as is whatever else looks at the number

In a second trace, an object stands for each of these numbers.  It knows sums and products, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from ...guards.attribute_writes import AttributeWrite, AttributeWrites, Formula
from ...tensors.expressions import Operation, Part, Variable

NUMBERS = (int, float)
ARITHMETIC = ("add", "sub", "mul")
OBJECT = frozenset({
    "__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__setattr__",
    "__delattr__", "__dir__", "__sizeof__",
})  # fmt: skip


class _NumberNeededError(Exception):
    """Forward needs the value."""


class CountedNumber:
    """Stands for an int or a float of a module."""

    __slots__ = ("__weakref__", "formula", "kind")

    def __init__(self, formula: Part, kind: type) -> None:
        self.formula, self.kind = formula, kind

    @property  # type: ignore[misc] # so that `isinstance(self.calls, int)` holds, as it does in eager
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] # never set
        return self.kind


def changed_numbers(writes: AttributeWrites) -> tuple[AttributeWrite, ...]:
    """Return the writes of numbers to attributes that the next call reads; these have their earlier values again."""
    found = (item for item in writes.changing if item.owner.keys is None)
    values = ((item, item.attribute.value, item.value(lambda leaf: leaf)) for item in found)
    return tuple(item for item, *both in values if all(type(value) in NUMBERS for value in both))


@contextmanager
def counting(numbers: Sequence[AttributeWrite], found: list[AttributeWrite]) -> Iterator[None]:
    """Let objects stand for these numbers, and find the writes that change them as the block does.

    Raises:
        _NumberNeededError: the block stores something else in their place.
    """
    before = [item.attribute.value for item in numbers]
    found.clear()
    for item, value in zip(numbers, before, strict=True):
        item.write(CountedNumber(Variable(item.attribute), type(value)))
    try:
        yield
        for item in numbers:
            formula = Formula(_formula(item.attribute.value))
            found.append(replace(item, leaves=(formula,), settles=True, change=item.where))
    finally:
        for item, value in zip(numbers, before, strict=True):
            item.write(value)


def _formula(value: Any) -> Part:
    if type(value) is CountedNumber:
        return value.formula
    if type(value) is int or type(value) is float:
        return value
    raise _NumberNeededError(f"a {type(value).__name__} takes its place")


def _arithmetic(name: str, reflected: bool = False) -> Callable[[CountedNumber, Any], CountedNumber]:
    def compute(self: CountedNumber, other: Any) -> CountedNumber:
        operands = (other, self) if reflected else (self, other)
        kind = int if self.kind is int and other.__class__ is int else float
        return CountedNumber(Operation(name, tuple(map(_formula, operands))), kind)

    return compute


def _needs_value(name: str) -> Callable[..., NoReturn]:
    def refuse(self: CountedNumber, *rest: object) -> NoReturn:
        raise _NumberNeededError(f"Python asks for {name}")

    return refuse


for _name in {*dir(float), *dir(int)} - OBJECT:
    setattr(CountedNumber, _name, _needs_value(_name))
for _name in ARITHMETIC:
    setattr(CountedNumber, f"__{_name}__", _arithmetic(_name))
    setattr(CountedNumber, f"__r{_name}__", _arithmetic(_name, reflected=True))
