"""A generator of `random` or numpy that is the module's own gives other numbers in each step, as in eager, or is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memgraph

WIDTH = 8
GLOBAL = np.random.default_rng(5)


class Holder:
    """An object that has a generator."""

    def __init__(self) -> None:
        self.inner = {"rng": random.Random(2)}


class Drawing(nn.Module):
    """Scales by a number that it draws."""

    def __init__(self, rng: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.rng, self.draw = nn.Linear(WIDTH, WIDTH), rng, draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * (1 + self.draw(self.rng))


class FromGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * (1 + GLOBAL.random())


class Net(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(WIDTH, WIDTH), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.first(x)).square().mean()


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "Random": (lambda: random.Random(3), lambda rng: rng.random()),
    "Random that keeps a number": (lambda: random.Random(3), lambda rng: rng.gauss(0, 1)),
    "Generator": (lambda: np.random.default_rng(3), lambda rng: float(rng.random())),
    "RandomState": (lambda: np.random.RandomState(3), lambda rng: float(rng.rand())),
    "Generator of an object": (Holder, lambda rng: rng.inner["rng"].random()),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_submodule_that_draws_from_its_own_generator_runs_as_in_eager(name: str) -> None:
    make, draw = CASES[name]
    ours = Net(Drawing(make(), draw))
    theirs = copy.deepcopy(ours)
    compiled = memgraph.compile(ours, "1MB", time_limit=0.5)
    losses = []
    for _ in range(4):
        x = torch.randn(4, WIDTH)
        loss, expected = compiled(x), theirs(x)
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert torch.equal(mine.grad, other.grad)
        ours.zero_grad()
        theirs.zero_grad()
        losses.append(loss.item())
    assert len(set(losses)) == 4
    assert len(compiled.plans) == 1
    assert [row.path for row in compiled.plan.opaque] == ["part"]


@pytest.mark.parametrize("name", CASES)
def test_the_whole_model_is_refused_with_the_name_of_the_generator(name: str) -> None:
    make, draw = CASES[name]
    model = Drawing(make(), draw)
    before = draw(copy.deepcopy(model.rng))
    with pytest.raises(memgraph.CaptureError, match=r"draws from rng, a (Random|Generator)"):
        memgraph.compile(model, "1MB")(torch.randn(4, WIDTH))
    assert draw(model.rng) == before


def test_a_generator_among_the_globals_of_forward_is_found() -> None:
    before = copy.deepcopy(GLOBAL).random()
    with pytest.raises(memgraph.CaptureError, match=r"draws from tests\.memgraph\.\S*GLOBAL, a Generator"):
        memgraph.compile(FromGlobal(), "1MB")(torch.randn(4, WIDTH))
    assert GLOBAL.random() == before


def test_a_generator_that_forward_does_not_draw_from_does_no_harm() -> None:
    compiled = memgraph.compile(Drawing(random.Random(1), lambda rng: 1.0), "1MB")
    compiled(torch.randn(4, WIDTH)).sum().backward()
    assert not compiled.plan.opaque
