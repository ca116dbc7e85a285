"""A step that adds to gradients while some are None, because an optimizer of some parameters cleared only theirs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support.models import batch, net


def step(model: nn.Module, x: Tensor, let_go: Sequence[nn.Parameter]) -> None:
    model(x).backward(torch.ones_like(x))
    for parameter in let_go:
        parameter.grad = None


@pytest.mark.long
@pytest.mark.parametrize("which", [slice(0, None, 2), slice(1, None, 2), slice(2, 3), slice(0)])
def test_what_it_measures_is_what_is_measured_from_outside(which: slice) -> None:
    model, x = net(), batch()
    parameters = list(model.parameters())
    compiled = memgraph.compile(model, 10**8, time_limit=0)
    for _ in range(3):  # plain, one that measures itself, one that is timed
        step(compiled, x, parameters[which])
    there = resident_bytes([*parameters, x, *(p.grad for p in parameters if p.grad is not None)])
    _, allocated = measure_peak(lambda: step(compiled, x, ()))
    assert allocated is not None
    assert compiled.plan.measured == there + allocated.peak <= compiled.plan.peak
