"""Gradients of parameters that several stages read: each makes a part, and the parts are added once a step.

stage 0: part of the table's gradient  \\
                                         ->   their sum, on both
stage 3: part of the table's gradient  /
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..ranks.messages import Message, receive, send, wait_for
from ..ranks.stage_group import StageGroup


class SharedGradients:
    """The shared parameters of one rank, and the ranks that have each of them."""

    def __init__(
        self, group: StageGroup, parameters: Mapping[str, Tensor], owners: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.group, self.parameters = group, parameters
        self.owners = {name: sorted({stage % group.ranks for stage in stages}) for name, stages in owners.items()}
        self.names = sorted(name for name, ranks in self.owners.items() if len(ranks) > 1 and group.rank in ranks)
        self._earlier: list[Tensor | None] = []

    def begin(self) -> None:
        """Set aside the gradients of earlier steps, which are sums already."""
        self._earlier = [self.parameters[name].grad for name in self.names]
        for name in self.names:
            self.parameters[name].grad = None

    def finish(self) -> None:
        """Add the parts of all ranks, in their order, and then the gradients of earlier steps."""
        for name, earlier in zip(self.names, self._earlier, strict=True):
            gradient = self.parameters[name].grad
            assert gradient is not None
            self._sum(name, gradient, self.owners[name])
            if earlier is not None:
                self.parameters[name].grad = earlier.add_(gradient)
        self._earlier = []

    def _sum(self, name: str, gradient: Tensor, ranks: Sequence[int]) -> None:
        first, rank = ranks[0], self.group.rank
        if rank != first:
            wait_for(self.group, send(self.group, [(Message(name, gradient, rank, first), gradient)]))
            gradient.copy_(receive(self.group, [Message(name, gradient, first, rank)]).wait()[name])
            return
        for other in ranks[1:]:
            gradient.add_(receive(self.group, [Message(name, gradient, other, first)]).wait()[name])
        works = send(self.group, [(Message(name, gradient, first, other), gradient) for other in ranks[1:]])
        wait_for(self.group, works)


def make_gradients(parameters: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Let each parameter have a gradient to add to."""
    for name in dict.fromkeys(names):
        parameter = parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
