"""Numbers that a graph reads from its tensors, and guards on what Python asked about them.

    s = loss.item(); y = x * (1 - s)   ->   number = memgraph_guards::number(loss)
                                            computed = memgraph_guards::computed([number], "1 - v0")
                                            y = aten.mul(x, computed)
    if index.max().item() >= 7: ...    ->   memgraph_guards::holds([number], "v0 >= 7", False, guard=0)

A number is no tensor and takes no memory.  Ops take it as eager's ops take a Python number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..tensors.expressions import evaluate, parse
from .define_op import define_op
from .guard_ops import GuardFailed, values_of
from .nodes import GUARDS
from .ops import is_in_step


def is_number(node: fx.Node) -> bool:
    """Return True if the value of a node is a number that is read from tensors."""
    return node.target in (NUMBER, COMPUTED)


def _number(x: Tensor) -> Any:
    return values_of(x)[0]


def _computed(numbers: Sequence[Any], expression: str) -> Any:
    return evaluate(parse(expression), dict(enumerate(numbers)))


def _holds(numbers: Sequence[Any], predicate: str, expected: bool, *, guard: int) -> None:
    if not is_in_step():
        return
    try:
        is_as_expected = bool(_computed(numbers, predicate)) is expected
    except (ArithmeticError, ValueError):  # as of `int(nan)`, which forward will raise itself when it is traced again
        is_as_expected = False
    if not is_as_expected:
        raise GuardFailed(guard, (not expected,))


def _no_number(*args: object) -> float:
    return math.nan


def _nothing(numbers: Sequence[Any], predicate: str, expected: bool, *, guard: int) -> None:
    pass


_library = torch.library.Library(GUARDS, "FRAGMENT")
NUMBER = define_op(_library, "number(Tensor x) -> Scalar", _number, _no_number)
COMPUTED = define_op(_library, "computed(Scalar[] numbers, str expression) -> Scalar", _computed, _no_number)
HOLDS = define_op(
    _library, "holds(Scalar[] numbers, str predicate, bool expected, *, int guard) -> ()", _holds, _nothing
)
