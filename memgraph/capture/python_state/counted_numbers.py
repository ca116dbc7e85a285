"""Find out whether a graph depends on the numbers that forward changes on its module.

    self.calls += 1                      ->   a formula: the graph is the same for any number
    self.calls += 1; x * self.calls      ->   refused, as is whatever else looks at the number

In a second trace, an object stands for each of these numbers.  It knows sums and products, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from ...errors import CaptureError
from ...graph.counters import Counter
from ...guards.attribute_snapshot import AttributeSnapshot, changed_number_error
from ...tensors.expressions import Operation, Part, Variable

NUMBERS = (int, float)
ARITHMETIC = ("add", "sub", "mul")
Place = tuple[str, nn.Module, str]  # of an attribute: path, submodule, name
OBJECT = frozenset({
    "__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__setattr__",
    "__delattr__", "__dir__", "__sizeof__",
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class ChangedNumbers:
    """The numbers that forward has changed, and the error if it needs them."""

    places: tuple[Place, ...]
    error: CaptureError


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


def take_back_numbers(before: AttributeSnapshot, unread: Set[tuple[int, str]]) -> ChangedNumbers | None:
    """Put back the numbers of submodules that forward has changed, and return where they are; None without any.

    Those that are known to be `unread`, by the id of the submodule and the name, are written, whatever they were.
    """
    changed: list[Place] = []
    errors: list[CaptureError] = []
    for (path, module), attributes in zip(before.modules, before.attributes, strict=True):
        for name, old in attributes.items():
            new = vars(module).get(name)
            is_counted = type(old) in NUMBERS and type(new) in NUMBERS and (id(module), name) not in unread
            if is_counted and repr(old) != repr(new):
                vars(module)[name] = old
                changed.append((path, module, name))
                errors.append(changed_number_error(f"{path}.{name}".removeprefix("."), old, new))
    return ChangedNumbers(tuple(changed), errors[0]) if changed else None


@contextmanager
def counting(places: Sequence[Place], found: list[Counter]) -> Iterator[None]:
    """Let objects stand for these numbers, and find how the block changes them.

    Raises:
        _NumberNeededError: the block stores something else in their place.
    """
    before = [vars(module)[name] for _, module, name in places]
    found.clear()
    for path, module, name in places:
        vars(module)[name] = CountedNumber(Variable((path, name)), type(vars(module)[name]))
    try:
        yield
        found.extend(Counter(path, name, _formula(vars(module).get(name))) for path, module, name in places)
    finally:
        for (_, module, name), value in zip(places, before, strict=True):
            vars(module)[name] = value


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
