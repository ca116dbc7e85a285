"""A function that TorchScript has compiled is traced as the Python that it was compiled from."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture.scripted_functions import scripted, unscripted

with warnings.catch_warnings(action="ignore"):

    @torch.jit.script
    def scaled(x: Tensor, width: int) -> Tensor:
        return x / torch.sqrt(torch.tensor(width, dtype=torch.float)) + torch.where(x > 0, x, torch.tensor(0.5))


@pytest.mark.long
def test_its_ops_are_the_steps_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return scaled(self.linear(x), 8).square().mean()

    x, found = torch.randn(4, 8), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Net()
        called = memgraph.compile(model, "1GB") if compiled else model
        for _ in range(4):  # TorchScript compiles again once it has seen the shapes
            called(x).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_calls_come_from_python_in_a_block_and_from_torchscript_in_one_inside() -> None:
    calls = list[int]()
    function: Any = scaled
    plain = function._torchdynamo_inline

    def counted(x: Tensor, width: int) -> Tensor:
        calls.append(width)
        return plain(x, width)

    function._torchdynamo_inline = counted
    try:
        with unscripted():
            scaled(torch.ones(2), 4)
            with scripted():
                scaled(torch.ones(2), 5)
        scaled(torch.ones(2), 6)
    finally:
        function._torchdynamo_inline = plain
    assert calls == [4]


def test_one_without_its_python_is_called_as_it_is() -> None:
    graph = torch.jit.CompilationUnit("def doubled(x):\n    return 2 * x\n")
    with unscripted():
        assert torch.equal(graph.doubled(torch.ones(2)), 2 * torch.ones(2))
