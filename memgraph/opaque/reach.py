"""Facts of the autograd graph of a part's call.

    y = w * x + x    ->   the gradient of y reaches w once and x twice

Autograd adds the gradients of a tensor in the order in which it meets them. An op returns one sum for each tensor, so
the order is eager's only if no other gradient of that tensor comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..tensors.loss_outputs import reachable_nodes


def reached_leaves(output: Tensor, positions: Mapping[int, int]) -> frozenset[int]:
    """Return the positions of the leaves that the gradient of an output reaches; -1 for any other leaf.

    `positions` maps ids of leaves to their positions.
    """
    if not output.requires_grad:
        return frozenset()
    if output.grad_fn is None:
        return frozenset((positions.get(id(output), -1),))
    variables = [getattr(node, "variable", None) for node in reachable_nodes([output.grad_fn])]
    return frozenset(positions.get(id(variable), -1) for variable in variables if variable is not None)


def gradient_counts(outputs: Sequence[Tensor], positions: Mapping[int, int]) -> dict[int, int]:
    """Return how many gradients autograd adds up for each leaf, by its position."""
    counts: Counter[int] = Counter()
    for node in reachable_nodes([output.grad_fn for output in outputs]):
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None:
                counts[positions.get(id(variable), -1)] += 1
    return dict(counts)
