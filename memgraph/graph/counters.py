"""Numbers on the module that each forward changes by the same formula.

    self.calls += 1   ->   Counter("", "calls", ("add", ("attribute", "", "calls"), ("number", 1)))

The graph is the same for any value of these, so a new value needs no capture.  Each run of a step evaluates the
formulas after its forward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {name: getattr(operator, name) for name in ("add", "sub", "mul")}
Formula = tuple[Any, ...]  # ("attribute", path, name), ("number", value), or an operator with two formulas


@dataclass(frozen=True)
class Counter:
    """An attribute of the submodule at `path`, and its value after forward."""

    path: str
    name: str
    formula: Formula


def advance(module: nn.Module, counters: Sequence[Counter]) -> None:
    """Change the counters as one forward does."""
    values = [_value(counter.formula, module) for counter in counters]
    for counter, value in zip(counters, values, strict=True):
        vars(module.get_submodule(counter.path))[counter.name] = value


def _value(formula: Formula, module: nn.Module) -> Any:
    kind, *operands = formula
    if kind == "number":
        return operands[0]
    if kind == "attribute":
        path, name = operands
        return vars(module.get_submodule(path))[name]
    return OPERATORS[kind](*(_value(operand, module) for operand in operands))
