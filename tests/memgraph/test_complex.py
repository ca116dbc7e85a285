"""Complex numbers, of which torch conjugates views when they are read: whoever reads one may make a copy first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import memgraph
from tests.smallest import smallest_of
from tests.streamed import SLACK, assert_kept, facts, same, streams

WIDTH = 160


class Layers(nn.Module):
    """Products with conjugated weights, whose gradients are conjugated in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = (torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH**0.5 for _ in range(4))
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in made)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight.conj()).tanh()
        return x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    for seed in range(3):
        x = torch.randn(8, WIDTH, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        run(x).abs().square().mean().backward()
        optimizer.step()
    found = facts(model, optimizer)
    return [None if tensor is None else tensor.resolve_conj() for tensor in found]


def test_training_equals_eager_within_the_budget() -> None:
    make: Any = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    plain, model = Layers(), Layers()
    optimizer, x = make(model.parameters()), torch.zeros(8, WIDTH, dtype=torch.complex64)
    wishes = {"optimizer": optimizer, "time_limit": 0}
    budget = int(smallest_of(lambda: memgraph.plan(model, x, budget=1, **wishes)) * SLACK)
    compiled = memgraph.compile(model, budget, **wishes)
    ours = train(model, optimizer, compiled)
    assert same(ours, train(plain, make(plain.parameters()), plain))
    assert streams(compiled)
    assert_kept(compiled, budget)


def test_the_copy_of_what_is_conjugated_is_workspace() -> None:
    model, x = nn.Linear(256, 256, bias=False, dtype=torch.complex64), torch.zeros(8, 256, dtype=torch.complex64)
    compiled = memgraph.compile(model, 10**8, time_limit=0)
    compiled(x.requires_grad_()).abs().sum().backward()
    assert_kept(compiled, 10**8)


def test_gradients_accumulate_without_a_copy() -> None:
    plain, model = Layers(), Layers()
    compiled, x = memgraph.compile(model, 10**8, time_limit=0), torch.ones(1, WIDTH, dtype=torch.complex64)
    for _ in range(3):
        for run in (plain, compiled):
            run(x).abs().sum().backward()
        assert_kept(compiled, 10**8)
    ours, theirs = ([p.grad.resolve_conj() for p in net.parameters() if p.grad is not None] for net in (model, plain))
    assert len(ours) == 4 and all(map(torch.equal, ours, theirs))
