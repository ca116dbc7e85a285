"""Guards: ops that check at each run what a capture assumed about the values of tensors.

    if mask.any(): ...      ->   any = aten.any(mask);  memgraph_guards::equal(any, [True], guard=0)
    rows = mask.nonzero()   ->   rows = memgraph_guards::nonzero(mask, sizes=[2, 7, 2], ..., guard=1)

`sizes` and `strides` describe all results, each by its number of dimensions and then its dimensions.  A guard checks
in a step only: where an op is priced, its inputs are generated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from .define_op import define_op
from .nodes import GUARDS, UNGUARDED, aten, is_guard
from .ops import agree_with_ranks, is_in_step

Scalars = tuple[float | int | bool, ...]

TOLIST = torch.Tensor.tolist  # a trace puts another in its place

# Ops whose results have sizes that depend on values.
DYNAMIC: tuple[OpOverload, ...] = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_dim_consecutive.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
)


class GuardFailed(Exception):
    """A run of a step met other values than its capture assumed.

    Attributes:
        guard: number of the guard in its graph.
        actual: what it found; the sizes of an op's results, or values.
        guards: all guards of its graph.
    """

    def __init__(self, guard: int, actual: Scalars, guards: Sequence[ValueGuard] = ()) -> None:
        super().__init__(f"guard {guard} has found {actual}")
        self.guard, self.actual, self.guards = guard, actual, guards


@dataclass(frozen=True)
class ValueGuard:
    """An assumption that a graph rests on.

    Attributes:
        expected: values of a tensor, the sizes of the results of `op`, or the truth of `predicate`.
        where: submodule and source line.
        predicate: a comparison of numbers `v0`, `v1`, ... that are read from tensors.
    """

    number: int
    expected: Scalars
    op: str
    where: str
    predicate: str = ""

    @property
    def question(self) -> tuple[str, str, str]:
        """The op, the place and the predicate: two guards with the same question may expect different answers."""
        return self.op, self.where, self.predicate

    @property
    def path(self) -> str:
        """The submodule that asks; empty for the whole module, and for one that runs as it is."""
        path = self.where.partition(" ")[0]
        return "" if self.op == "opaque" or ":" in path else path

    @property
    def assumption(self) -> str:
        """The assumption in words."""
        if self.predicate:
            return f"{self.predicate} is {self.expected[0]}"
        if self.op == "opaque":
            return "it runs as it is, and returns results of the same structure, shapes and strides"
        if self.op != "equal":
            return f"{self.op} has results of sizes {_shapes(self.expected)}"
        return f"the value is {self.expected[0] if len(self.expected) == 1 else list(self.expected)}"


def value_guards(graph: fx.Graph) -> tuple[ValueGuard, ...]:
    """Return the guards of a captured graph in order."""
    nodes = sorted(filter(is_guard, graph.nodes), key=_number)
    return tuple(
        ValueGuard(_number(node), _expected(node), _op_name(node), node.meta.get("where", ""), _predicate(node))
        for node in nodes
    )


def is_condition(guard: ValueGuard) -> bool:
    """Return True for a guard of one truth value, which has no sizes."""
    return guard.op == "equal" and len(guard.expected) == 1 and type(guard.expected[0]) is bool


def _number(node: fx.Node) -> int:
    number: Any = node.kwargs["guard"]
    return int(number)


def _op_name(node: fx.Node) -> str:
    target: Any = node.target
    return str(target._opname)


def sizes_of(results: Any) -> list[int]:
    """Return the sizes of all tensors of a result, each after its number of dimensions."""
    return [number for tensor in tree_leaves(results) for number in (tensor.dim(), *tensor.shape)]


def strides_of(results: Any) -> list[int]:
    """Return the strides of all tensors of a result, each after its number of dimensions."""
    return [number for tensor in tree_leaves(results) for number in (tensor.dim(), *tensor.stride())]


def values_of(tensor: Tensor) -> Scalars:
    """Return the numbers of a tensor."""
    with torch._C.DisableTorchFunction():  # modes of torch.func would call the one that a trace puts in its place
        return tuple(TOLIST(tensor.detach().reshape(-1)))


def same_values(actual: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return True if these are the same numbers; NaN equals NaN, and 0.0 differs from -0.0."""
    pairs = zip(actual, expected, strict=False)
    return len(actual) == len(expected) and all(_is_same(a, b) for a, b in pairs)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and one == other == 0.0:
        return math.copysign(1.0, one) == math.copysign(1.0, other)
    return bool(one == other or (one != one and other != other))


def _shapes(numbers: Sequence[Any]) -> list[tuple[int, ...]]:
    shapes, rest = [], [int(number) for number in numbers]
    while rest:
        end = 1 + rest[0]
        shapes.append(tuple(rest[1:end]))
        rest = rest[end:]
    return shapes


def _expected(node: fx.Node) -> Scalars:
    if _predicate(node):
        return (bool(node.args[2]),)
    expected: Any = node.args[1] if node.target is EQUAL else node.kwargs["sizes"]
    return tuple(expected)


def _predicate(node: fx.Node) -> str:
    return str(node.args[1]) if _op_name(node) == "holds" else ""


def _check(guard: int, actual: Sequence[Any], expected: Sequence[Any]) -> None:
    if is_in_step() and not same_values(actual, expected):
        raise GuardFailed(guard, tuple(actual))


def _equal(x: Tensor, expected: Sequence[Any], *, guard: int) -> None:
    _check(guard, values_of(x), expected)


def _agree(x: Tensor, *, guard: int) -> None:
    agree_with_ranks()


def _run_sized(
    op: OpOverload, *args: Any, sizes: list[int], strides: list[int], dtypes: list[str], guard: int,
    **kwargs: Any,
) -> Any:  # fmt: skip
    results = op(*args, **kwargs)
    if guard != UNGUARDED:
        _check(guard, sizes_of(results), sizes)
    return results


def _fake_sized(op: OpOverload, *args: Any, sizes: list[int], **kwargs: Any) -> Any:
    device = next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    layouts = zip(_shapes(sizes), _shapes(kwargs["strides"]), kwargs["dtypes"], strict=True)
    results = tuple(
        torch.empty_strided(size, stride, dtype=getattr(torch, dtype), device=device) for size, stride, dtype in layouts
    )
    return results if len(op._schema.returns) > 1 else results[0]


def _nothing(*args: object, guard: int) -> None:
    pass


def _sized_schema(op: OpOverload) -> str:
    """Return the schema of an op with the sizes, strides and types of its results as further arguments."""
    arguments, results = str(op._schema).partition("(")[2].split(") -> ", 1)
    star = "" if "*, " in arguments else "*, "
    extra = f"{star}int[] sizes, int[] strides, str[] dtypes, int guard"
    name = op._opname if op._overloadname == "default" else f"{op._opname}_{op._overloadname}"
    return f"{name}({arguments}, {extra}) -> {results}"


_library = torch.library.Library(GUARDS, "DEF")
EQUAL = define_op(_library, "equal(Tensor x, Scalar[] expected, *, int guard) -> ()", _equal, _nothing)
# Behind the last guard of forward.
AGREE = define_op(_library, "agree(Tensor x, *, int guard) -> ()", _agree, _nothing)
SIZED = {
    op: define_op(_library, _sized_schema(op), partial(_run_sized, op), partial(_fake_sized, op)) for op in DYNAMIC
}
