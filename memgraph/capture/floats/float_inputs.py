"""Stand-ins for the floats of a call, put in and taken out while it is traced.

module(x, 0.2), module.alpha = 0.5   ->   module(x, s), module.alpha = t   while forward is traced
mul(x, s)                            ->   mul(fake x, 0.2)                 where fake tensors are computed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...graph.float_arguments import takes_any_value
from ...guards.assumptions import ARGUMENTS
from ...tensors.expressions import Variable
from ...tensors.traced_number import (
    FloatArgument,
    FloatPlace,
    FloatTrace,
    NumberNode,
    TracedFloat,
    ValueNeededError,
    stand_in,
)


@dataclass(frozen=True)
class FloatInputs:
    """The floats of one call that are to be inputs.

    Attributes:
        containers: for floats in the module's attributes, the dict that contains each, and its key there.
    """

    values: dict[FloatPlace, float]
    containers: dict[FloatPlace, tuple[Any, Any]] = field(default_factory=dict)
    trace: FloatTrace = field(default_factory=FloatTrace)

    def in_leaves(self, leaves: Sequence[object]) -> list[Any]:
        """Return the leaves of a call, with stand-ins for floats."""
        places = [(ARGUMENTS, index) for index in range(len(leaves))]
        return [
            self._stand_in(place) if place in self.values and place not in self.containers else leaf
            for place, leaf in zip(places, leaves, strict=True)
        ]

    @contextmanager
    def in_attributes(self) -> Iterator[None]:
        """Put stand-ins into the module's attributes, and restore its floats in the end."""
        before = [(container, key, container[key]) for container, key in self.containers.values()]
        try:
            for place, (container, key) in self.containers.items():
                container[key] = self._stand_in(place)
            yield
        finally:
            for container, key, value in before:
                container[key] = value

    def _stand_in(self, place: FloatPlace) -> TracedFloat:
        return stand_in(NumberNode(Variable(place), self.values[place], self.trace))


def with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments of an op with values in place of traced floats.

    Raises:
        ValueNeededError: the shape or type of the op's result may depend on the value.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if not any(isinstance(leaf, torch.SymFloat | torch.SymInt) for leaf in leaves):
        return args, kwargs
    if not takes_any_value(func):
        raise ValueNeededError(f"the result of {func} may depend on it")
    return pytree.tree_unflatten(
        [leaf.node.value if isinstance(leaf, torch.SymFloat | torch.SymInt) else leaf for leaf in leaves], spec
    )


def with_stand_ins(arguments: Any) -> Any:
    """Return the arguments of a graph node with stand-ins, for another trace."""
    return pytree.tree_map_only(FloatArgument, lambda argument: stand_in(argument.node), arguments)
