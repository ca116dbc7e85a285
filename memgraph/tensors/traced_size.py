"""Sizes that stand for any length while a call is traced, and the lengths for which the trace holds.

x of 8 x 120, 120 is symbol s     ->   view(x, [8 * s])   is written as   view(x, [960]), and 960 knows that it is 8 * s
`if x.shape[1] > 512` in forward  ->   the guard s <= 512

The symbols are torch's: every branch on a size, in Python or in a kernel's description, is a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch import SymInt, fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true
from torch.utils import _pytree as pytree

Number = Callable[[Any], int]  # from a size of a trace to the number that it is
SYMBOLIC = SymInt, torch.SymFloat, torch.SymBool
LEAST = 2  # lengths 0 and 1 broadcast, and make other graphs


class SizeNeededError(Exception):
    """A trace needs the value of a size that was to be a symbol."""


class SizeArgument(int):
    """The number that a size had when it was traced, as an argument of a graph node."""

    size: SymInt

    def __new__(cls, size: SymInt) -> Self:
        argument = super().__new__(cls, size.node.hint)
        argument.size = size
        return argument

    def __deepcopy__(self, memo: object) -> SizeArgument:
        return self


class SizeTrace:
    """One trace with symbols in place of `lengths`."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.env = ShapeEnv(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.sizes: list[int | SymInt] = []
        self._conditions: list[Callable[[Number], bool]] = []
        self._symbols: list[Any] = []
        for place, length in enumerate(lengths):
            source = ConstantSource(f"length_{place}")
            symbol = self.env.create_symbol(length, source, dynamic_dim=DimDynamic.DYNAMIC)
            self._symbols.append(symbol)
            self.sizes.append(self.env.create_symintnode(symbol, hint=length, source=source))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let traces write sizes as `SizeArgument`, instead of ops that compute them."""
        with mock.patch.object(proxy_tensor, "fetch_sym_proxy", lambda tracer: _argument):
            yield

    def require(self, condition: Callable[[Number], bool]) -> None:
        """Limit the trace to lengths for which a condition holds; it is given what a size of the trace is."""
        self._conditions.append(condition)

    @property
    def is_general(self) -> bool:
        """Return False if the trace needed the value of a length."""
        return not any(self.env.replace(symbol).is_number for symbol in self._symbols)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Return True if the call is traced to the same ops with these lengths."""
        numbers = self._numbers(lengths)
        guards = dict.fromkeys(guard.expr for guard in self.env.guards)
        if min(lengths) < LEAST or not all(guard.xreplace(numbers) == sympy.true for guard in guards):
            return False
        number = self.at(lengths)
        return all(condition(number) for condition in self._conditions)

    def at(self, lengths: Sequence[int]) -> Number:
        """Return the function from a size of the trace to the number that it is for these lengths."""
        numbers, known = self._numbers(lengths), dict[Any, int]()

        def number(size: Any) -> int:
            if isinstance(size, SizeArgument):
                size = size.size
            if not isinstance(size, SymInt):
                return int(size)
            expression = size.node.expr
            if expression not in known:
                known[expression] = int(expression.xreplace(numbers))
            return known[expression]

        return number

    def _numbers(self, lengths: Sequence[int]) -> dict[Any, sympy.Integer]:
        return dict(zip(self._symbols, map(sympy.Integer, lengths), strict=True))


def always_equal(sizes: Sequence[int | SymInt], others: Sequence[int | SymInt]) -> bool:
    """Return True if sizes are known to be equal at any length.

    `==` would limit the trace to the lengths at which they are, or to those at which they are not.
    """
    if [*map(_number, sizes)] != [*map(_number, others)]:  # at this length they differ
        return False
    return all(statically_known_true(size == other) for size, other in zip(sizes, others, strict=True))


def _number(size: int | SymInt) -> int:
    return int(size.node.hint) if isinstance(size, SymInt) else size


def has_sizes(node: fx.Node) -> bool:
    """Return True if a node has sizes among its arguments."""
    return any(map(_is_or_has, (*node.args, *node.kwargs.values())))


def _is_or_has(argument: object) -> bool:
    parts = argument if isinstance(argument, list | tuple) else (argument,)
    return any(isinstance(part, SizeArgument) for part in parts)


def with_sizes(arguments: Any) -> Any:
    """Return the arguments of a graph node with symbols, to compute them on fake tensors."""
    return pytree.tree_map_only(SizeArgument, lambda argument: argument.size, arguments)


def with_arguments(arguments: Any) -> Any:
    """Return the arguments of a graph node, or a module's result, with symbols written as numbers."""
    if not any(type(leaf) in SYMBOLIC for leaf in pytree.tree_leaves(arguments)):
        return arguments
    return pytree.tree_map(lambda leaf: _argument(leaf) if type(leaf) in SYMBOLIC else leaf, arguments)


def _argument(size: Any) -> Any:
    node = size.node
    if node.constant is not None:
        return node.constant
    if node.expr.is_number:
        return bool(node.expr) if isinstance(size, torch.SymBool) else node.hint
    if not isinstance(size, SymInt):
        raise SizeNeededError(f"a number is computed from it, {node.expr}")
    return SizeArgument(size)
