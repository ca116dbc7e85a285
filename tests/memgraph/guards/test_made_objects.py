"""An object of torch's that forward makes is no fact of a call, and nothing keeps it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributions import AffineTransform, Normal, TransformedDistribution

import memgraph


class Shifted(TransformedDistribution):
    def __init__(self, base: Any, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(base, [AffineTransform(loc=self.loc, scale=2.0)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.layer(x)
        shifted: Any = Shifted(Normal(out, out.exp() * 0.5), out.mean(1, keepdim=True))
        return -shifted.log_prob(y).mean()


def test_a_distribution_that_forward_makes_is_gone_after_it() -> None:
    gc.collect()
    before = sum(isinstance(thing, FakeTensor) and thing.grad_fn is not None for thing in gc.get_objects())
    model = memgraph.compile(Net(), "1GB")
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    model(x, y).backward()
    gc.collect()
    alive = sum(isinstance(thing, FakeTensor) and thing.grad_fn is not None for thing in gc.get_objects())
    assert alive == before
    assert not [each for each in model.plan.assumptions if "Shifted.loc" in str(each)]
