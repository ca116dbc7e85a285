"""A submodule that draws from `random` or numpy runs as it is, and draws what it draws in eager."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture.capture import capture
from memgraph.capture.python_random import allow_python_random, refuse_python_random
from tests.support.compare import Fact, assert_alike, steps

X = torch.linspace(-1, 1, 16).view(2, 8)


class Masked(nn.Module):
    """Masks what numpy and Python draw."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor(np.random.rand(8) < random.random())
        return self.body(x) * mask


class Net(nn.Module):
    """Draws in a submodule of a submodule, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), Masked()), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Asking(Net):
    """Asks for a value first, so that the submodule that draws is met in the run for values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x if bool(x.isfinite().all()) else x.nan_to_num())


def seeded(model: nn.Module) -> list[Fact]:
    np.random.seed(3)
    random.seed(3)
    return [*steps(model), torch.tensor([np.random.rand(), random.random()])]


@pytest.mark.parametrize("make", [Net, Asking])
def test_it_draws_as_in_eager(make: type[nn.Module]) -> None:
    assert_alike(seeded, make)


def test_the_innermost_submodule_is_opaque() -> None:
    captured = capture(Net(), (X,), {}, opaque=True)
    assert [part.path for part in captured.opaque] == ["layers.1.1"]


def test_a_module_that_draws_itself_is_refused_and_changes_no_generator() -> None:
    python, state = random.getstate(), np.random.get_state(legacy=False)["state"]["key"]
    with pytest.raises(memgraph.CaptureError, match="draws random numbers"):
        capture(Masked(), (X,), {})
    assert random.getstate() == python and np.array_equal(np.random.get_state(legacy=False)["state"]["key"], state)


def test_what_is_allowed_to_draw_may() -> None:
    with refuse_python_random(nn.Identity()), allow_python_random():
        assert random.random() >= 0
