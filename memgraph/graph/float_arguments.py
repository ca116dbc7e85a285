"""Floats of a call among the arguments of graph nodes.

mul(x, 0.1), where 0.1 was traced as an input   ->   the node that computes it from the floats of each call
"""

from __future__ import annotations

from torch import fx
from torch.utils import _pytree as pytree

from ..tensors.traced_number import FloatArgument, NumberNode, ValueNeededError
from .nodes import is_random


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
