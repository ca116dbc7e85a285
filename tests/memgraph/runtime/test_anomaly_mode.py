"""torch's anomaly mode finds the op of backward that makes a NaN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from tests.support.compare import same_gradients

ROOM = "1GB"


class Rooted(nn.Module):
    """The gradient of a root is infinite at zero, and times zero it is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu().mul(0).sqrt()).sum()


class Masked(nn.Module):
    """Values that are none are masked, in forward and in formulas of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.first(x), 0.5)
        scores = (y @ y.t()).masked_fill(torch.eye(len(x), dtype=torch.bool), float("-inf")).softmax(-1)
        constant = torch.cat([y[:, :1] * 0 + 1] * 3, 1)
        return scores.sum() + (y * 0).pow(0).sum() + constant.std(1).sum() + y.norm()


@pytest.fixture
def anomaly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            yield


@pytest.mark.usefixtures("anomaly")
@pytest.mark.parametrize("share", [1.0, 0.85])
def test_the_op_that_makes_a_nan_is_named_with_its_line_and_nothing_reaches_the_parameters(share: float) -> None:
    model, x = Rooted(), torch.ones(256, 8)
    with pytest.raises(RuntimeError, match="returned nan values"):
        model(x).backward()
    model.zero_grad()
    budget = int(share * memgraph.plan(model, x, budget=ROOM).peak)
    compiled = memgraph.compile(model, budget, offload=None, accumulate=False, time_limit=0)
    loss = compiled(x)
    with pytest.raises(RuntimeError, match=r"aten\.mul.*test_anomaly_mode\.py:\d+, returned nan values"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("anomaly")
def test_gradients_without_a_nan_are_as_ever() -> None:
    ours, theirs, x = Masked(), Masked(), torch.randn(6, 8)
    theirs.load_state_dict(ours.state_dict())
    compiled = memgraph.compile(ours, ROOM)
    for _ in range(3):
        for model in (theirs, compiled):
            torch.manual_seed(0)
            model(x).backward()
    assert same_gradients(ours, theirs)


def test_without_the_mode_a_nan_is_a_gradient() -> None:
    compiled = memgraph.compile(Rooted(), ROOM)
    compiled(torch.ones(4, 8)).backward()
    assert any(parameter.grad.isnan().any() for parameter in compiled.parameters() if parameter.grad is not None)


@pytest.mark.usefixtures("anomaly")
def test_without_its_check_of_nan_the_mode_lets_it_pass() -> None:
    compiled = memgraph.compile(Rooted(), ROOM)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        compiled(torch.ones(4, 8)).backward()
