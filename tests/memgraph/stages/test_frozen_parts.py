"""Frozen parts send no gradients, and get none."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph


class FrozenLayers(nn.Module):
    """28 layers; the last four are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8).requires_grad_(i > 23) for i in range(28))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(x, y)


def test_no_gradient_crosses_frozen_parts() -> None:
    torch.manual_seed(0)
    begins = [0, 79, 100, 133]  # layers 0, 7, 14 and 25: one that is trained is in the last stage but one
    pipe = memgraph.pipeline(FrozenLayers(), "1GB", 2, schedule="interleaved", stages_per_rank=4, balance=begins)
    pipe.prepare(x=torch.randn(4, 8), y=torch.randn(4, 8))
    cut = pipe._latest.cut
    trained = {stage for stages in cut.owners.values() for stage in stages}
    backward = {(each.sender, each.receiver) for each in cut.messages if each.receiver < each.sender}
    forward = {(each.sender, each.receiver) for each in cut.messages if each.receiver > each.sender}
    assert trained == {2, 3}
    assert forward == {(k, k + 1) for k in range(3)}
    assert backward == {(3, 2)}
