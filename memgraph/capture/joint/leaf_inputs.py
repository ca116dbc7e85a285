"""Inputs that forward may change in place though they require a gradient, since an op before the module made them.

    h = before(x); model(h)       model begins with nn.ReLU(inplace=True): afterwards h is another tensor for autograd,
                                  and gradients reach `before` through its old value

In a trace, such an input has an autograd node, as `h` has, but no op. In a step, `rewrite_leaf_inputs` tells autograd
that `h` is now the step's result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True)
class InputGradEdges:
    """Where the gradients of such inputs, as they were before the call, arrive in a trace; by position."""

    edges: Mapping[int, GradientEdge] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Sequence[Tensor], places: Sequence[int]) -> InputGradEdges:
        """Give the traced inputs at these positions an autograd node, without recording an op."""
        for place in places:
            seed = torch.zeros((), requires_grad=True)
            _InputGradEdge.apply(values[place].requires_grad_(False), seed)  # type: ignore[no-untyped-call]
        return cls({place: get_gradient_edge(values[place]) for place in places})

    def seeds(self) -> list[int]:
        """Return the ids of the leaves behind the nodes, whose gradients are not needed."""
        behind = [node for edge in self.edges.values() for node, _ in edge.node.next_functions]
        return [id(node.variable) for node in behind if node is not None]  # type: ignore[attr-defined]

    def rewritten(self, values: Sequence[Tensor]) -> list[int]:
        """Return the positions of inputs that forward has changed in place, with autograd's knowledge."""
        return [place for place, edge in self.edges.items() if values[place].grad_fn is not edge.node]


def rewrite_leaf_inputs(outputs: list[Tensor], tensors: Sequence[Tensor], rewritten: Mapping[int, int]) -> list[Tensor]:
    """Return the outputs, with each changed input itself in place of its new value."""
    for place, output in rewritten.items():
        outputs[output] = _RewrittenInput.apply(tensors[place], outputs[output])  # type: ignore[no-untyped-call]
    return outputs


class _InputGradEdge(torch.autograd.Function):
    """The identity, as an in-place op."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seed: Tensor) -> Tensor:
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _RewrittenInput(torch.autograd.Function):
    """Replace `tensor` by `value` for autograd: gradients reach `value`, and not what `tensor` was."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]
