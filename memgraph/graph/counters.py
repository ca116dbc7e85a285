"""Numbers on the module that each forward changes by the same formula.

    self.calls += 1   ->   Counter("", "calls", Operation("add", (Variable(("", "calls")), 1)))

The graph is the same for any value of these, so a new value needs no capture.  Each run of a step evaluates the
formulas after its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..tensors.expressions import Part, evaluate, variables


@dataclass(frozen=True)
class Counter:
    """An attribute of the submodule at `path`, and its value after forward.

    The variables of the formula are attributes, by path and name.
    """

    path: str
    name: str
    formula: Part


def advance(module: nn.Module, counters: Sequence[Counter]) -> None:
    """Change the counters as one forward does."""
    keys = {key for counter in counters for key in variables(counter.formula)}
    numbers = {(path, name): vars(module.get_submodule(path))[name] for path, name in keys}
    for counter in counters:
        vars(module.get_submodule(counter.path))[counter.name] = evaluate(counter.formula, numbers)
