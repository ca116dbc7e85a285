"""A submodule that draws from `random` or numpy runs as it is, and draws what it draws in eager."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture.capture import capture
from memgraph.capture.python_state.refused_draws import allow_python_random, refuse_python_random
from tests.support.compare import Fact, assert_alike, steps

X = torch.linspace(-1, 1, 16).view(2, 8)


class Shuffled(nn.Module):
    """Scales by what numpy and Python shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        order = list(range(8))
        random.shuffle(order)
        np.random.shuffle(order)
        return self.body(x) * torch.tensor(order)


class Net(nn.Module):
    """Draws in a submodule of a submodule, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), Shuffled()), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Asking(Net):
    """Asks for a value first, so that the submodule that draws is met in the run for values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x if bool(x.isfinite().all()) else x.nan_to_num())


class Mixed(Net):
    """Draws around a part that draws, and asks for a coin behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x * torch.tensor(random.uniform(1, 2))
        x = self.layers(x)
        return x if random.random() < 0.5 else x + torch.tensor(np.random.rand(8)).float()


class CountingPart(Net):
    """Changes a number that a part reads, which runs before the numbers are counted."""

    def forward(self, x: Tensor) -> Tensor:
        self.get_submodule("layers.1.1").calls += 1  # type: ignore[operator, assignment]
        return self.layers(x)


def seeded(model: nn.Module) -> list[Fact]:
    np.random.seed(3)
    random.seed(3)
    return [*steps(model), torch.tensor([np.random.rand(), random.random()])]


@pytest.mark.long
@pytest.mark.parametrize("make", [Net, Asking, Mixed])
def test_it_draws_as_in_eager(make: type[nn.Module]) -> None:
    assert_alike(seeded, make)


def test_the_innermost_submodule_is_opaque() -> None:
    captured = capture(Net(), (X,), {}, opaque=True)
    assert [part.path for part in captured.opaque] == ["layers.1.1"]


def test_a_module_that_draws_itself_is_refused_and_changes_no_generator() -> None:
    python, state = random.getstate(), np.random.get_state(legacy=False)["state"]["key"]
    with pytest.raises(memgraph.CaptureError, match="draws random numbers"):
        capture(Shuffled(), (X,), {})
    assert random.getstate() == python and np.array_equal(np.random.get_state(legacy=False)["state"]["key"], state)


def test_what_is_allowed_to_draw_may() -> None:
    with refuse_python_random(nn.Identity()), allow_python_random():
        assert random.random() >= 0


@pytest.mark.long
def test_a_model_with_a_part_counts() -> None:
    model = Mixed()
    compiled = memgraph.compile(model, "1GB", offload=None)
    for calls in range(1, 7):
        compiled(X).sum().backward()
        compiled.zero_grad()
        assert model.calls == calls
    assert {part.path for part in compiled._latest.parts.captured.opaque} == {"layers.1.1"}
    assert 1 <= len(compiled.plans) <= 2  # one for each side of the coin


def test_a_number_of_a_part_is_not_counted_beside_it() -> None:
    model = CountingPart()
    part = model.get_submodule("layers.1.1")
    part.calls = 0  # type: ignore[assignment]
    with pytest.raises(memgraph.CaptureError, match="calls"):
        capture(model, (X,), {}, opaque=True)
    assert part.calls == 0
