"""Stand-ins for Python floats that become inputs of a graph.

    x * scale              ->   mul(x, scale),             given the float at each call
    x * (1 - scale) ** 2   ->   mul(x, (1 - scale) ** 2),  computed in Python before each call

While a call is traced, a `TracedFloat` stands for the float.  Ops take it as they take the float itself, so types and
rounding are eager's, and the formulas of autograd pass it on.  Whatever needs the value (a branch, `int()`, `math.exp`,
an op that takes a double) raises `ValueNeededError`: the float is then a constant of the graph.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

FloatPlace = tuple[int, int]  # the part of a call's guard key that has the float, and the entry in that part
FloatValues = Mapping[FloatPlace, float]
SpecialValue = tuple["FloatNode", float]  # a float, and a value for which autograd has another formula

ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
SIGNS = ("neg", "pos", "abs")
# Every method of float that is not a plain object's asks for the value; so do these of an object's.
OBJECT = frozenset({*dir(object), "__getnewargs__"} - {
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__", "__str__", "__format__",
    "__reduce__", "__reduce_ex__",
})  # fmt: skip


class ValueNeededError(Exception):
    """A trace needs the value of a float that was to be an input."""


class SpecialValueError(Exception):
    """A formula of autograd differs for exactly this value: nothing is multiplied by `alpha=1.0`."""


@dataclass
class FloatTrace:
    """One trace with stand-ins: the values that would make another graph, and the stand-ins given to forward."""

    special_values: list[SpecialValue] = field(default_factory=list)
    stand_ins: list[weakref.ref[TracedFloat]] = field(default_factory=list)

    def has_escaped(self) -> bool:
        """Return True if forward stored a stand-in where it outlives the trace; torch then takes it as no number."""
        if any(ref() is not None for ref in self.stand_ins):
            gc.collect()
        escaped = [stand_in for ref in self.stand_ins if (stand_in := ref()) is not None]
        for stand_in in escaped:
            object.__dict__["__class__"].__set__(stand_in, _EscapedFloat)
        return bool(escaped)


class FloatArgument(float):
    """The value that a float had when it was traced, as an argument of a graph node."""

    node: FloatNode

    def __new__(cls, value: float, node: FloatNode) -> FloatArgument:
        argument = super().__new__(cls, value)
        argument.node = node
        return argument

    def __deepcopy__(self, memo: object) -> FloatArgument:
        return self


class FloatNode:
    """The symbolic node of a `TracedFloat`, with the methods that torch expects of its own symbolic numbers.

    Attributes:
        compute: returns the float, given the floats of a call.
        constant: the float at capture; make_fx writes it into the graph.
    """

    def __init__(self, compute: Callable[[FloatValues], Any], value: float, trace: FloatTrace) -> None:
        self.compute, self.trace = compute, trace
        self.constant = FloatArgument(value, self)

    def is_float(self) -> bool:
        return True

    def is_int(self) -> bool:
        return False

    is_bool = is_nested_int = is_constant = is_int

    def is_symbolic(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        return None

    maybe_as_float = constant_int = constant_bool = nested_int = maybe_as_int

    def wrap_float(self, value: float) -> FloatNode:
        return FloatNode(_constant(value), value, self.trace)

    def eq(self, other: FloatNode) -> _Equality:
        return _Equality(self, float(other.constant))

    def guard_float(self, file: str, line: int) -> NoReturn:
        raise ValueNeededError("an op takes the number itself")

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueNeededError(f"torch asks for {name}")


class _Equality:
    """A formula's comparison of a float with a number: that they differ is noted as a condition of the graph."""

    def __init__(self, node: FloatNode, number: float) -> None:
        self.node, self.number = node, number

    def is_bool(self) -> bool:
        return True

    def is_int(self) -> bool:
        return False

    is_float = is_nested_int = is_constant = is_int

    def guard_bool(self, file: str, line: int) -> bool:
        if float(self.node.constant) == self.number:
            raise SpecialValueError(self.number)
        self.node.trace.special_values.append((self.node, self.number))
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueNeededError(f"torch asks for {name}")


class TracedFloat(torch.SymFloat):
    """Stands for a float while a call is traced, as do sums, products and powers of it."""

    node: FloatNode

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that `isinstance(scale, float)` holds, as it does in eager
        return float


class _EscapedFloat:
    """A stand-in whose trace is over: an op that is given one raises, as it would for any object."""

    node: FloatNode

    def __float__(self) -> float:
        return float(self.node.constant)

    def __repr__(self) -> str:
        return repr(float(self))


def stand_in(node: FloatNode) -> TracedFloat:
    """Return a stand-in for a float."""
    traced = TracedFloat(node)  # type: ignore[no-untyped-call]
    node.trace.stand_ins.append(weakref.ref(traced))
    return traced


def _needs_value(name: str) -> Callable[..., NoReturn]:
    def refuse(self: TracedFloat, *rest: object) -> NoReturn:
        raise ValueNeededError(f"Python asks for {name}")

    return refuse


def _arithmetic(name: str, reflected: bool = False) -> Callable[..., Any]:
    """Return the method that computes with traced floats as Python will with their values."""
    run: Callable[..., Any] = getattr(operator, name)

    def compute(self: TracedFloat, *rest: Any) -> Any:
        if any(not _is_traced(other) and type(other) not in (int, float) for other in rest):
            return NotImplemented
        operands = (*rest, self) if reflected else (self, *rest)
        parts = [operand.node.compute if _is_traced(operand) else _constant(operand) for operand in operands]
        value = run(*(float(operand.node.constant) if _is_traced(operand) else operand for operand in operands))
        if type(value) is not float:
            raise ValueNeededError(f"{name} makes a {type(value).__name__}")
        return stand_in(FloatNode(lambda values: run(*(part(values) for part in parts)), value, self.node.trace))

    return compute


def _constant(value: float) -> Callable[[FloatValues], float]:
    return lambda values: value


def _is_traced(value: object) -> bool:
    return type(value) is TracedFloat


for _name in set(dir(float)) - OBJECT:
    setattr(TracedFloat, _name, _needs_value(_name))
for _name in ARITHMETIC:
    setattr(TracedFloat, f"__{_name}__", _arithmetic(_name))
    setattr(TracedFloat, f"__r{_name}__", _arithmetic(_name, reflected=True))
for _name in SIGNS:
    setattr(TracedFloat, f"__{_name}__", _arithmetic(_name))
