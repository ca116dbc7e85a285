"""The sums of gradients of a parameter that is used several times."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memgraph.capture.capture import capture
from memgraph.graph.gradient_sums import gradient_sums
from memgraph.tensors.loss_outputs import select_losses


class Tied(nn.Module):
    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses, self.layer, self.other = uses, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = self.layer(x).relu()
        return (self.other(x) + x).square().mean()


def test_the_sums_of_a_parameter_that_is_used_three_times_are_found() -> None:
    captured = capture(Tied(3), (torch.randn(2, 4),), {}, wanted=select_losses)
    sums = gradient_sums(captured)
    assert len(sums) == 4  # two for the weight, and two for the bias
    nodes = {node.name: node for node in captured.graph.graph.nodes}
    assert all(nodes[name].meta["val"].shape in {(4, 4), (4,)} for name in sums)


def test_a_sum_of_gradients_of_values_is_none() -> None:
    assert not gradient_sums(capture(Tied(1), (torch.randn(2, 4),), {}, wanted=select_losses))
