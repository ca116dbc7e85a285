"""A parameter that several ops of one stage read gets its gradient there, with the bits of the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import memgraph
from tests.support.ranks import on_ranks
from tests.support.staged_models import in_turn


class Twice(nn.Module):
    """One layer called three times in a row, or one that reads its weight in several ops; and others behind it."""

    def __init__(self, is_normed: bool) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Linear(8, 8)) if is_normed else nn.Linear(8, 8)
        self.same = [self.first] * (1 if is_normed else 3)
        self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(20))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in (*self.same, *self.others):
            x = layer(x).tanh()
        return F.mse_loss(x, y)


def _different(rank: int, is_normed: bool, schedule: str) -> list[str]:
    """Return the parameters of this rank whose gradients have other bits than those of the plain model."""
    torch.manual_seed(0)
    model, batch = Twice(is_normed), {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}
    plain = dict(in_turn(copy.deepcopy(model), batch, 3)[0].named_parameters())
    pipe = memgraph.pipeline(model, "1GB", 3, schedule=schedule)
    pipe.step(**batch)
    return [key for key, value in pipe.named_parameters() if not torch.equal(value.grad, plain[key].grad)]  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("is_normed, schedule", [(False, "1f1b"), (True, "1f1b"), (False, "zero_bubble")])
def test_sums_of_one_stage_have_the_bits_of_the_plain_model(is_normed: bool, schedule: str) -> None:
    assert on_ranks(2, _different, is_normed, schedule) == [[], []]


class Everywhere(nn.Module):
    """A scale that each layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layers = nn.Parameter(torch.full((8,), 1.5)), nn.ModuleList(nn.Linear(8, 8) for _ in range(9))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = (layer(x) * self.scale).tanh()
        return F.mse_loss(x, y)


def _everywhere(rank: int, schedule: str) -> tuple[bool, list[str], bool]:
    """Return whether all stages have the scale, the parameters with other gradients, and if the scale's is right."""
    torch.manual_seed(0)
    model, batch = Everywhere(), {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}
    plain = dict(in_turn(copy.deepcopy(model), batch, 3)[0].named_parameters())
    pipe = memgraph.pipeline(model, "1GB", 3, schedule=schedule)
    pipe.step(**batch)
    found = {key: value.grad for key, value in pipe.named_parameters()}
    wrong = [key for key, value in found.items() if key != "scale" and not torch.equal(value, plain[key].grad)]  # type: ignore[arg-type]
    cut = pipe._latest.cut
    return len(cut.owners["scale"]) == len(cut.begins), wrong, torch.allclose(found["scale"], plain["scale"].grad)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_parameter_of_all_stages_has_the_sum_of_their_gradients(schedule: str) -> None:
    assert on_ranks(2, _everywhere, schedule) == [(True, [], True)] * 2
