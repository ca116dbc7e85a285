"""Layers that torch treats in ways of their own train as they do in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import memgraph
from memgraph import CaptureError
from tests.support.compare import Fact, assert_alike, batch, both, steps, tight
from tests.support.models import Function, Plain


def test_reparametrized_weights_train() -> None:
    def make() -> nn.Module:
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        return nn.Sequential(normed, nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))

    assert_alike(steps, make)


@pytest.mark.long
@both
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True},
        {"num_layers": 2, "dropout": 0.3, "bidirectional": True, "batch_first": True},
        {"bias": False, "dtype": torch.float64},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind_of", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_train(kind_of: Any, options: dict[str, Any]) -> None:
    def forward(function: Any, x: Tensor) -> Any:
        return function.layer(x)[0]

    def loop(model: Any) -> list[Fact]:
        x = batch(12).view(3, 4, 8).to(options.get("dtype"))
        with torch.no_grad():
            facts: list[Fact] = [model(x)]
        for _ in range(2):
            model(x).square().mean().backward()
        return facts

    assert_alike(loop, lambda: Function(forward, kind_of(8, 8, **options)))


def test_what_is_changed_in_place_lies_as_it_did() -> None:
    def forward(function: Any, x: Tensor) -> Tensor:
        pieces = function.layer(x).unsafe_chunk(2, 1)
        return pieces[0].add_(pieces[1]).sigmoid_() * 3

    assert_alike(steps, lambda: Function(forward, nn.Linear(8, 14)))


@tight
def test_a_module_without_parameters() -> None:
    def loop(model: Any) -> list[Fact]:
        x = batch().requires_grad_()
        out = model(x)
        out.sum().backward()
        return [out, x.grad, model(batch())]

    assert_alike(loop, lambda: nn.Sequential(nn.Tanh(), nn.Softmax(-1)))


@tight
def test_what_the_user_checkpoints_is_recomputed_with_the_same_random_numbers() -> None:
    class Checkpointed(Plain):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(super().forward, x, use_reentrant=False)
            return checkpoint(self.second, h, use_reentrant=True).square()

    assert_alike(steps, Checkpointed)


class Own(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.generator, self.twice = torch.Generator().manual_seed(3), twice

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu() * torch.rand(8, generator=self.generator)
        h = torch.bernoulli(h.sigmoid(), generator=self.generator) * h if self.twice else h
        return self.last(F.dropout(h, 0.3)).sin()


OLD = TorchVersion(torch.__version__) < "2.13"  # which can't trace a generator


@pytest.mark.skipif(not OLD, reason="torch 2.13 and later trace generators")
def test_a_generator_of_the_modules_own_is_refused_where_torch_cant_trace_it() -> None:
    with pytest.raises(CaptureError, match=r"draws from a torch\.Generator of the module's own"):
        memgraph.plan(Own(), batch(), budget="1GB")


@pytest.mark.skipif(OLD, reason="torch 2.12 and earlier can't trace a generator")
@both
@pytest.mark.parametrize("twice", [False, True])
def test_a_generator_of_the_modules_own_goes_on_as_in_eager(twice: bool) -> None:
    def loop(model: Any) -> list[Fact]:
        found = steps(model, 3)
        return [*found, model.generator.get_state()]

    assert_alike(loop, lambda: Own(twice))
