"""Floats of a call as inputs of its graph, so that another value needs no other graph.

    x * scale              ->   mul(x, scale),             given the float at each call
    x * (1 - scale) ** 2   ->   mul(x, (1 - scale) ** 2),  computed in Python before each call

While a call is traced, a `TracedFloat` stands for the float.  Ops take it as they take the float itself, so that types
and rounding are eager's, and the formulas of autograd hand it on.  Whatever has to know the value (a branch, `int()`,
`math.exp`, an op that takes a double) raises `ValueNeededError`: the float is then a constant of the graph.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NoReturn

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from .nodes import aten, is_random

Place = tuple[int, int]  # where a float stands in the guard of a call: the part, and the entry in it
GIVEN, ATTRIBUTES = 1, 4  # the parts of a guard that have floats: see `signature`
Values = Mapping[Place, float]
Special = tuple["FloatNode", float]  # a float, and the value at which a formula is another

ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
SIGNS = ("neg", "pos", "abs")
# Of a plain object; all else that a float can do asks for its value.
OBJECT = frozenset({*dir(object), "__getnewargs__"} - {
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__", "__str__", "__format__",
    "__reduce__", "__reduce_ex__",
})  # fmt: skip
# Not tagged pointwise; what they make has the same shape and type whatever the float is.
TAKERS = frozenset({
    aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default,
    aten.floor_divide.default, aten.floor_divide_.Tensor, aten.constant_pad_nd.default, aten.index_fill.int_Scalar,
    aten.index_fill_.int_Scalar, aten.scatter.value, aten.scatter_.value, aten.index_add.default,
    aten.fill.Scalar, aten.fill_.Scalar, aten.masked_fill.Scalar, aten.masked_fill_.Scalar,
    aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addr.default, aten.addbmm.default,
    aten.threshold.default, aten.threshold_backward.default, aten.leaky_relu_backward.default,
    aten.elu_backward.default, aten.softplus_backward.default, aten.hardtanh_backward.default,
})  # fmt: skip


class ValueNeededError(Exception):
    """A trace asked for the value of a float that was to be an input."""


class SpecialValueError(Exception):
    """A formula of autograd's does otherwise for just this value of a float: nothing is multiplied by `alpha=1.0`."""


@dataclass
class Notes:
    """What one trace finds: values that would make another graph, and the stand-ins that it has handed to forward."""

    special: list[Special] = field(default_factory=list)
    made: list[weakref.ref[TracedFloat]] = field(default_factory=list)

    def kept(self) -> bool:
        """Whether forward has put one where it outlives the trace.  It is no number for torch from then on."""
        if any(ref() is not None for ref in self.made):
            gc.collect()
        left = [one for ref in self.made if (one := ref()) is not None]
        for one in left:
            object.__dict__["__class__"].__set__(one, _Left)
        return bool(left)


class FloatMark(float):
    """The value that a float had when it was traced, in the place of a node's argument."""

    node: FloatNode

    def __new__(cls, value: float, node: FloatNode) -> FloatMark:
        mark = super().__new__(cls, value)
        mark.node = node
        return mark

    def __deepcopy__(self, memo: object) -> FloatMark:
        return self


class FloatNode:
    """What a `TracedFloat` stands for, by the names by which torch asks its own symbolic numbers."""

    def __init__(self, compute: Callable[[Values], Any], value: float, notes: Notes) -> None:
        self.compute, self.notes = compute, notes
        self.constant = FloatMark(value, self)  # which make_fx writes down

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
        return FloatNode(_constant(value), value, self.notes)

    def eq(self, other: FloatNode) -> _Equality:
        return _Equality(self, float(other.constant))

    def guard_float(self, file: str, line: int) -> NoReturn:
        raise ValueNeededError("an op takes the number itself")

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueNeededError(f"torch asks for {name}")


class _Equality:
    """Whether a float is a number, which a formula asks; that it is not is noted."""

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
        self.node.notes.special.append((self.node, self.number))
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueNeededError(f"torch asks for {name}")


class TracedFloat(torch.SymFloat):
    """Stands for a float while a call is traced; sums, products and powers of it do so too."""

    node: FloatNode

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that `isinstance(scale, float)` holds, as it does in eager
        return float


class _Left:
    """A stand-in whose trace is over: a tensor that meets it raises, and so knows nothing of it."""

    node: FloatNode

    def __float__(self) -> float:
        return float(self.node.constant)

    def __repr__(self) -> str:
        return repr(float(self))


def traced(node: FloatNode) -> TracedFloat:
    """A stand-in for a float."""
    made = TracedFloat(node)  # type: ignore[no-untyped-call]
    node.notes.made.append(weakref.ref(made))
    return made


def _need(name: str) -> Callable[..., NoReturn]:
    def ask(self: TracedFloat, *rest: object) -> NoReturn:
        raise ValueNeededError(f"Python asks for {name}")

    return ask


def _computed(verb: str, turned: bool = False) -> Callable[..., Any]:
    """The method that computes with traced floats as Python will with their values."""
    run: Callable[..., Any] = getattr(operator, verb)

    def compute(self: TracedFloat, *rest: Any) -> Any:
        if any(not _is_traced(other) and type(other) not in (int, float) for other in rest):
            return NotImplemented
        given = (*rest, self) if turned else (self, *rest)
        parts = [part.node.compute if _is_traced(part) else _constant(part) for part in given]
        value = run(*(float(part.node.constant) if _is_traced(part) else part for part in given))
        if type(value) is not float:
            raise ValueNeededError(f"{verb} makes a {type(value).__name__}")
        return traced(FloatNode(lambda values: run(*(part(values) for part in parts)), value, self.node.notes))

    return compute


def _constant(value: float) -> Callable[[Values], float]:
    return lambda values: value


def _is_traced(thing: object) -> bool:
    return type(thing) is TracedFloat


for _name in set(dir(float)) - OBJECT:
    setattr(TracedFloat, _name, _need(_name))
for _name in ARITHMETIC:
    setattr(TracedFloat, f"__{_name}__", _computed(_name))
    setattr(TracedFloat, f"__r{_name}__", _computed(_name, turned=True))
for _name in SIGNS:
    setattr(TracedFloat, f"__{_name}__", _computed(_name))


@dataclass(frozen=True)
class Floats:
    """The floats of one call that are to be inputs: their values, and for those that lie in the module's attributes the
    dict that holds each, with its key there."""

    values: dict[Place, float]
    held: dict[Place, tuple[Any, Any]] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)

    def in_leaves(self, leaves: Sequence[object]) -> list[Any]:
        """The leaves of a call, with traced floats in their places."""
        places = [(GIVEN, index) for index in range(len(leaves))]
        return [
            self._traced(place) if place in self.values and place not in self.held else leaf
            for place, leaf in zip(places, leaves, strict=True)
        ]

    @contextmanager
    def in_attributes(self) -> Iterator[None]:
        """Have traced floats lie where the module holds its own, which are put back."""
        before = [(held, key, held[key]) for held, key in self.held.values()]
        try:
            for place, (held, key) in self.held.items():
                held[key] = self._traced(place)
            yield
        finally:
            for held, key, value in before:
                held[key] = value

    def _traced(self, place: Place) -> TracedFloat:
        return traced(FloatNode(itemgetter(place), self.values[place], self.notes))


def plain(func: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of an op with values for traced floats.

    Raises:
        ValueNeededError: what the op makes may depend on more than the shapes of tensors.
    """
    leaves, form = pytree.tree_flatten((args, kwargs))
    if not any(isinstance(leaf, torch.SymFloat) for leaf in leaves):
        return args, kwargs
    tags = getattr(func, "tags", ())
    if not isinstance(func, OpOverload) or not (torch.Tag.pointwise in tags or func in TAKERS):
        raise ValueNeededError(f"{func} may make something else")
    if torch.Tag.nondeterministic_seeded in tags:
        raise ValueNeededError(f"{func} draws random numbers")
    return pytree.tree_unflatten(
        [float(leaf.node.constant) if isinstance(leaf, torch.SymFloat) else leaf for leaf in leaves], form
    )


def traced_again(arguments: Any) -> Any:
    """The arguments of a node for another trace."""
    return pytree.tree_map_only(FloatMark, lambda mark: traced(mark.node), arguments)


def marks(node: fx.Node) -> list[FloatMark]:
    """The floats among a node's arguments that are inputs."""
    return [leaf for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(leaf, FloatMark)]


def float_inputs(graph: fx.Graph) -> tuple[FloatNode, ...]:
    """The different floats that a graph's ops read, in their order.

    Raises:
        ValueNeededError: an op that draws random numbers reads one.
    """
    found: dict[FloatNode, None] = {}
    for node in graph.nodes:
        for mark in marks(node):
            found[mark.node] = None
            if is_random(node):
                raise ValueNeededError(f"{node.target} draws random numbers")
    return tuple(found)
