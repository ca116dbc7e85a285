"""The weights of the parts of a mean are as exact as the mean is."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import memgraph


def test_a_mean_over_the_targets_of_uneven_parts_is_exact_in_float64() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x, target = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 3, (7,))
    whole = cross_entropy(model(x), target)
    (expected,) = torch.autograd.grad(whole, model.weight)
    compiled = memgraph.compile(model, "1GB", loss=cross_entropy, microbatches=2, reduction="mean")
    ours = compiled(x, target=target)
    ours.backward()
    torch.testing.assert_close(ours, whole, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-13, atol=1e-16)
