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
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ..graph.nodes import aten
from ..guards.signature import ARGUMENTS
from ..tensors.expressions import Variable
from ..tensors.traced_number import (
    FloatArgument,
    FloatPlace,
    FloatTrace,
    NumberNode,
    TracedFloat,
    ValueNeededError,
    stand_in,
)

# Ops that are not tagged as pointwise, but whose results have the same shape and type whatever the float is.
SAME_SHAPE = frozenset({
    aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default,
    aten.floor_divide.default, aten.floor_divide_.Tensor, aten.constant_pad_nd.default, aten.index_fill.int_Scalar,
    aten.index_fill_.int_Scalar, aten.scatter.value, aten.scatter_.value, aten.index_add.default,
    aten.fill.Scalar, aten.fill_.Scalar, aten.masked_fill.Scalar, aten.masked_fill_.Scalar,
    aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addr.default, aten.addbmm.default,
    aten.threshold.default, aten.threshold_backward.default, aten.leaky_relu_backward.default,
    aten.elu_backward.default, aten.softplus_backward.default, aten.hardtanh_backward.default,
})  # fmt: skip


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


def takes_any_value(func: Any) -> bool:
    """Return True if the shape and type of an op's result are the same for all values of a number that it takes."""
    tags = getattr(func, "tags", ())
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or func in SAME_SHAPE or func.namespace == "memgraph_guards"


def with_stand_ins(arguments: Any) -> Any:
    """Return the arguments of a graph node with stand-ins, for another trace."""
    return pytree.tree_map_only(FloatArgument, lambda argument: stand_in(argument.node), arguments)
