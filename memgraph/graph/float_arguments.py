"""Floats of a call among the arguments of graph nodes.

mul(x, 0.1), where 0.1 was traced as an input   ->   the node that computes it from the floats of each call
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ..tensors.traced_number import FloatArgument, NumberNode, ValueNeededError
from .nodes import GUARDS, aten, is_random

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


def float_arguments(node: fx.Node) -> list[FloatArgument]:
    """Return the arguments of a node that are float inputs."""
    return [leaf for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(leaf, FloatArgument)]


def float_inputs(graph: fx.Graph) -> tuple[NumberNode, ...]:
    """Return the different floats that a graph's ops read, in order of first use.

    Raises:
        ValueNeededError: an op that draws random numbers reads one.
    """
    inputs: dict[NumberNode, None] = {}
    for node in graph.nodes:
        for argument in float_arguments(node):
            inputs[argument.node] = None
            if is_random(node):
                raise ValueNeededError(f"{node.target} draws random numbers")
    return tuple(inputs)


def takes_any_value(func: object) -> bool:
    """Return True if the shape and type of an op's result are the same for all values of a number that it takes."""
    tags = getattr(func, "tags", ())
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or func in SAME_SHAPE or func.namespace == GUARDS
