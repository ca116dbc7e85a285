"""Stand-ins for Python numbers that are inputs of a graph, or are read from its tensors.

    x * scale                     ->   mul(x, scale),             given the float at each call
    x * (1 - scale) ** 2          ->   mul(x, (1 - scale) ** 2),  computed in Python before each call
    x * loss.item()               ->   mul(x, number(loss)),      read when the graph runs
    if index.max().item() >= n    ->   a guard that this is still false

While a call is traced, a `TracedFloat` stands for a float, and a `TracedInt` for an int.  Ops take them as they take
the number itself, so types and rounding are eager's, and the formulas of autograd pass them on.  What needs the value
(a branch, `int()`, `math.exp`, an op that takes a double) asks the trace for it.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from .expressions import BINARY, COMPARISONS, SIGNS, Operation, Part, evaluate

FloatPlace = tuple[int, int]  # the part of a call's guard key that has the float, and the entry in that part
FloatValues = Mapping[FloatPlace, float]
SpecialValue = tuple["NumberNode", float]  # a float, and a value for which autograd has another formula

TAKEN = "an op takes the number itself"
UNARY = (*SIGNS, "abs")
PROPERTIES = ("real", "imag", "numerator", "denominator")
# Every method of a number that is not a plain object's asks for the value; so do these of an object's.
OBJECT = frozenset({*dir(object), "__getnewargs__"} - {
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__", "__str__", "__format__",
    "__reduce__", "__reduce_ex__",
})  # fmt: skip


class ValueNeededError(Exception):
    """A trace needs the value of a number that was to vary."""


class SpecialValueError(Exception):
    """A formula of autograd differs for exactly this value: nothing is multiplied by `alpha=1.0`."""


@dataclass
class NumberTrace:
    """One trace with stand-ins: those that forward was given, and what is done if their values are asked for."""

    stand_ins: list[weakref.ref[Any]] = field(default_factory=list)

    def value(self, node: NumberNode, reason: str) -> Any:
        """Return the value of a number on which the graph may depend.

        Raises:
            ValueNeededError: it may depend on none.
        """
        raise ValueNeededError(reason)

    def truth(self, predicate: Operation) -> bool:
        """Return the truth of a comparison on which the graph may depend.

        Raises:
            ValueNeededError: it may depend on none.
        """
        raise ValueNeededError("Python compares it")

    def differs(self, node: NumberNode, number: float) -> None:
        """Note that a formula of autograd holds while a number differs from another.

        Raises:
            SpecialValueError: it does not differ.
        """
        raise ValueNeededError("a formula of autograd compares it")

    def argument(self, node: NumberNode) -> Any:
        """Return what make_fx writes into the graph for a number."""
        raise NotImplementedError

    def check_types(self, name: str, operands: tuple[Any, ...]) -> None:
        """Make sure that an operation has a result of this type whatever its operands are."""

    def has_escaped(self) -> bool:
        """Return True if forward stored a stand-in where it outlives the trace; that is its number from now on."""
        if any(ref() is not None for ref in self.stand_ins):
            gc.collect()
        escaped = [stand_in for ref in self.stand_ins if (stand_in := ref()) is not None]
        for stand_in in escaped:
            stand_in.node = NumberNode(stand_in.node.value, stand_in.node.value, ENDED)
        return bool(escaped)


@dataclass
class FloatTrace(NumberTrace):
    """A trace in which floats of the call are inputs.

    Attributes:
        special_values: those that would make another graph.
    """

    special_values: list[SpecialValue] = field(default_factory=list)

    def differs(self, node: NumberNode, number: float) -> None:
        if node.value == number:
            raise SpecialValueError(number)
        self.special_values.append((node, number))

    def argument(self, node: NumberNode) -> FloatArgument:
        return FloatArgument(node.value, node)


class FloatArgument(float):
    """The value that a float had when it was traced, as an argument of a graph node."""

    node: NumberNode

    def __new__(cls, value: float, node: NumberNode) -> FloatArgument:
        argument = super().__new__(cls, value)
        argument.node = node
        return argument

    def __deepcopy__(self, memo: object) -> FloatArgument:
        return self


class NumberNode:
    """The symbolic node of a stand-in, with the methods that torch expects of its own symbolic numbers.

    Attributes:
        part: computes the number.
        value: the number at capture.
    """

    def __init__(self, part: Part, value: float, trace: NumberTrace) -> None:
        self.part, self.value, self.trace = part, value, trace

    def compute(self, values: Mapping[Any, Any]) -> Any:
        """Return the number, given the values of the variables."""
        return evaluate(self.part, values)

    @property
    def constant(self) -> Any:
        return self.trace.argument(self)

    def is_float(self) -> bool:
        return isinstance(self.value, float)

    def is_int(self) -> bool:
        return not self.is_float()

    def is_bool(self) -> bool:
        return False

    is_nested_int = is_constant = is_bool

    def is_symbolic(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        return None

    maybe_as_float = constant_int = constant_bool = nested_int = maybe_as_int

    def wrap_float(self, value: float) -> NumberNode:
        return NumberNode(value, value, self.trace)

    wrap_int = wrap_float

    def eq(self, other: NumberNode) -> _Equality:
        return _Equality(self, other.value)

    def guard_float(self, file: str, line: int) -> Any:
        return self.trace.value(self, TAKEN)

    guard_int = guard_float

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueNeededError(f"torch asks for {name}")


class _Equality:
    """A formula's comparison of a number with another: that they differ is noted as a condition of the graph."""

    def __init__(self, node: NumberNode, number: float) -> None:
        self.node, self.number = node, number

    def is_bool(self) -> bool:
        return True

    def is_int(self) -> bool:
        return False

    is_float = is_nested_int = is_constant = is_int

    def guard_bool(self, file: str, line: int) -> bool:
        self.node.trace.differs(self.node, self.number)
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueNeededError(f"torch asks for {name}")


class TracedFloat(torch.SymFloat):
    """Stands for a float while a call is traced, as do sums, products and powers of it."""

    node: NumberNode

    @property  # type: ignore[misc] # so that `isinstance(scale, float)` holds, as it does in eager
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] # never set
        return float


class TracedInt(torch.SymInt):
    """Stands for an int that is read from a tensor."""

    node: NumberNode

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] # never set
        return int


class EndedTrace(NumberTrace):
    """A trace that is over: what stood for a number in it is that number to Python, and no number to an op."""

    def value(self, node: NumberNode, reason: str) -> Any:
        if reason == TAKEN:
            raise TypeError("a number that forward kept in a trace is none for an op: forward keeps it elsewhere")
        return node.value

    def truth(self, predicate: Operation) -> bool:
        return bool(evaluate(predicate, {}))


ENDED = EndedTrace()
STAND_INS = (TracedFloat, TracedInt)


def stand_in(node: NumberNode) -> Any:
    """Return a stand-in for a number; in a trace that is over, the number."""
    if node.trace is ENDED:
        return node.value
    traced = (TracedFloat if node.is_float() else TracedInt)(node)
    node.trace.stand_ins.append(weakref.ref(traced))
    return traced


def is_traced(value: object) -> bool:
    """Return True for a stand-in in a trace."""
    found: Any = value
    return type(value) in STAND_INS and found.node.trace is not ENDED


def _asks_value(name: str) -> Callable[..., Any]:
    def ask(self: Any, *rest: object) -> Any:
        value = self.node.trace.value(self.node, f"Python asks for {name}")
        return getattr(value, name)(*rest)

    return ask


def _property(name: str) -> property:
    return property(lambda self: getattr(self.node.trace.value(self.node, f"Python asks for {name}"), name))


def _arithmetic(name: str, reflected: bool = False) -> Callable[..., Any]:
    """Return the method that computes with stand-ins as Python will with their values."""
    run: Callable[..., Any] = getattr(operator, name)

    def compute(self: Any, *rest: Any) -> Any:
        if not _are_numbers(self, rest):
            return NotImplemented
        operands = (*rest, self) if reflected else (self, *rest)
        self.node.trace.check_types(name, operands)
        value = run(*map(_value, operands))
        if type(value) is not float and not (type(value) is int and type(self) is TracedInt):
            raise ValueNeededError(f"{name} makes a {type(value).__name__}")
        return stand_in(NumberNode(Operation(name, tuple(map(_part, operands))), value, self.node.trace))

    return compute


def _comparison(name: str) -> Callable[..., Any]:
    def compare(self: Any, *rest: Any) -> Any:
        if not _are_numbers(self, rest):
            return NotImplemented
        return self.node.trace.truth(Operation(name, tuple(map(_part, (self, *rest)))))

    return compare


def _is_nonzero(self: Any) -> bool:
    return bool(self.node.trace.truth(Operation("ne", (self.node.part, 0))))


def _whole(self: Any) -> int:
    node: NumberNode = self.node
    whole = NumberNode(Operation("int", (node.part,)), int(node.value), node.trace)
    return int(node.trace.value(whole, "Python asks for __int__"))


def _are_numbers(self: Any, others: tuple[Any, ...]) -> bool:
    """Return True if Python computes with these itself.

    Raises:
        ValueNeededError: a float of the call meets a number of a tensor.
    """
    if any(is_traced(other) and other.node.trace is not self.node.trace for other in others):
        raise ValueNeededError("it is computed with a number that is read from a tensor")
    return all(type(other) in (int, float, *STAND_INS) for other in others)


def _value(operand: Any) -> Any:
    return operand.node.value if type(operand) in STAND_INS else operand


def _part(operand: Any) -> Part:
    part: Part = operand.node.part if type(operand) in STAND_INS else operand
    return part


WHOLE = {"__int__": _whole, "__trunc__": _whole}
for _kind, _traced in ((float, TracedFloat), (int, TracedInt)):
    for _name in set(dir(_kind)) - OBJECT:
        setattr(_traced, _name, _property(_name) if _name in PROPERTIES else _asks_value(_name))
    for _name in BINARY:
        setattr(_traced, f"__{_name}__", _arithmetic(_name))
        setattr(_traced, f"__r{_name}__", _arithmetic(_name, reflected=True))
    for _name in UNARY:
        setattr(_traced, f"__{_name}__", _arithmetic(_name))
    for _name in COMPARISONS:
        setattr(_traced, f"__{_name}__", _comparison(_name))
    for _name, _method in {"__bool__": _is_nonzero, **(WHOLE if _kind is float else {})}.items():
        setattr(_traced, _name, _method)
