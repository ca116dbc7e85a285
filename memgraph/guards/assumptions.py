"""The facts of a call that a capture assumes; numbers and lengths among them may be open to any value.

    captured with scale = 0.1, x: 8 x 128     ->   serves scale = 0.2 if that is open, and x: 8 x 120 if 128 is a symbol

The facts of a call are groups of tokens: arguments, tensors, modes, attributes, and a group for the variables that each
capture was the first to read.  A capture assumes nothing of groups that came after it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import NamedTuple

import torch

from ..tensors.traced_size import LEAST

Group = tuple[Hashable, ...]
Facts = tuple[Group, ...]
Place = tuple[int, int]  # a group, and a token in it
SizePlace = tuple[int, int]  # an argument, and a dimension of it
ARGUMENTS, TENSORS, MODES, ATTRIBUTES = range(4)  # groups; behind them come variables
ANY = "any"  # in the place of a number


class Layout(NamedTuple):
    """A parameter, a buffer or an argument; lengths of arguments may be open."""

    shape: tuple[Hashable, ...]
    stride: tuple[Hashable, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class TensorFact(NamedTuple):
    """A tensor among the arguments; `first` and `storage` are the first ones that are the same or share its storage."""

    first: int
    storage: int
    kind: type
    is_leaf: bool
    layout: Layout


@dataclass(frozen=True, eq=False)
class Assumptions:
    """Facts that a call must have.

    Attributes:
        open: places of numbers that may have any value.
        symbols: the symbol of each dimension that may have any length.
    """

    facts: Facts
    open: frozenset[Place] = frozenset()
    symbols: Mapping[SizePlace, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, facts: Facts, open_places: Collection[Place] = (), symbols: Mapping[SizePlace, int] | None = None
    ) -> Assumptions:
        """Return what a capture of a call with these facts assumes."""
        return cls(generalized(facts, open_places, symbols or {}), frozenset(open_places), symbols or {})

    def holds(self, facts: Facts) -> bool:
        """Return True if a call has these facts."""
        same = [then is now or then == now for then, now in zip(self.facts, facts, strict=False)]
        if len(same) < len(self.facts):
            return False
        return all(same) or ((bool(self.open) or bool(self.symbols)) and next(self.differing(facts), None) is None)

    def differing(self, facts: Facts) -> Iterator[Place]:
        """Yield the places where a call has other facts; -1 for a group that has more or fewer."""
        facts = generalized(facts, self.open, self.symbols)
        for group, (then, now) in enumerate(zip(self.facts, facts, strict=False)):
            if then is now:
                continue
            for index in range(len(then) if len(then) == len(now) else 0):
                if then[index] is not now[index] and then[index] != now[index]:
                    yield group, index
            if len(then) != len(now):
                yield group, -1

    def lengths(self, facts: Facts) -> list[int] | None:
        """Return the length of each symbol in a call; None if the call has none, or several for one symbol."""
        lengths: dict[int, int] = {}
        for (leaf, dim), symbol in self.symbols.items():
            shape = shape_of(facts[ARGUMENTS][leaf] if leaf < len(facts[ARGUMENTS]) else None)
            size = shape[dim] if dim < len(shape) else None
            if not isinstance(size, int) or size < LEAST or lengths.setdefault(symbol, size) != size:
                return None
        return [lengths[symbol] for symbol in range(len(lengths))]


def generalized(facts: Facts, places: Collection[Place], symbols: Mapping[SizePlace, int]) -> Facts:
    """Return facts with any number in some places, and any length in others."""
    if not places and not symbols:
        return facts
    groups = list(facts)
    for group in {group for group, _ in places}:
        tokens = list(groups[group])
        for index in (index for in_group, index in places if in_group == group and index < len(tokens)):
            kind = number_kind(tokens[index])
            tokens[index] = (kind, ANY) if kind is not None else tokens[index]
        groups[group] = tuple(tokens)
    if symbols:
        tokens = list(groups[ARGUMENTS])
        for leaf in {leaf for leaf, _ in symbols if leaf < len(tokens)}:
            fact = tokens[leaf]
            tokens[leaf] = _with_symbols(fact, leaf, symbols) if isinstance(fact, TensorFact) else fact
        groups[ARGUMENTS] = tuple(tokens)
    return tuple(groups)


def number_kind(token: Hashable) -> type | None:
    """Return the type of the number that a token stands for, if it does."""
    kind = token[0] if isinstance(token, tuple) and len(token) == 2 else None
    return kind if kind in (int, float) else None


def number_at(facts: Facts, place: Place) -> float | None:
    """Return the float at a place; None where any may be."""
    group, index = place
    token = facts[group][index]
    return None if not isinstance(token, tuple) or token[1] == ANY else float(token[1])


def differing_sizes(facts: Facts, other: Facts, places: Collection[Place]) -> dict[SizePlace, int]:
    """Return a symbol for each size that differs at these places; none if anything else differs there.

    Sizes that were equal in both calls have one symbol.
    """
    symbols: dict[tuple[Hashable, Hashable], int] = {}
    found: dict[SizePlace, int] = {}
    for group, leaf in places:
        now, then = (each[group][leaf] if group == ARGUMENTS and leaf >= 0 else None for each in (facts, other))
        shapes = shape_of(now), shape_of(then)
        if len(shapes[0]) != len(shapes[1]) or not (isinstance(now, TensorFact) and isinstance(then, TensorFact)):
            return {}
        for dim, sizes in enumerate(zip(*shapes, strict=True)):
            if sizes[0] != sizes[1]:
                found[leaf, dim] = symbols.setdefault(sizes, len(symbols))
    return found


def shape_of(token: Hashable) -> tuple[Hashable, ...]:
    """Return the shape that a token tells of, empty for a constant."""
    return token.layout.shape if isinstance(token, TensorFact) else ()


def dense_stride(shape: Sequence[int], dim: int) -> int:
    """Return the stride of a dimension in a dense tensor."""
    return prod(islice(shape, dim + 1, None))


def _with_symbols(fact: TensorFact, leaf: int, symbols: Mapping[SizePlace, int]) -> TensorFact:
    """Return a fact with symbols for lengths, and a word for strides that follow from them."""
    shape = fact.layout.shape
    if not all(isinstance(size, int) for size in shape):
        return fact
    of_dims = [symbols.get((leaf, dim)) for dim in range(len(shape))]
    spans = [any(symbol is not None for symbol in of_dims[dim + 1 :]) for dim in range(len(of_dims))]
    sizes: list[int] = [size for size in shape if isinstance(size, int)]
    layout = fact.layout._replace(
        shape=tuple(s if symbol is None else ("length", symbol) for s, symbol in zip(sizes, of_dims, strict=True)),
        stride=tuple(
            "dense" if spans[dim] and stride == dense_stride(sizes, dim) else stride
            for dim, stride in enumerate(fact.layout.stride)
        ),
    )
    return fact._replace(layout=layout)
