"""Layers that draw seeds from the system's entropy, and that differentiate by themselves, train as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.opaque.entropy_seeds import entropy_seeds
from tests.memgraph.opaque.test_opaque_parts import ROOM, WIDTH, Net, batch, beside_eager


@pytest.fixture(autouse=True)
def _entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.seed` depend on the generator alone, so that two trainings can be compared."""

    def seed() -> int:
        drawn = (torch.default_generator.initial_seed() * 48271 + 1) % (1 << 31)
        torch.default_generator.manual_seed(drawn)
        return drawn

    monkeypatch.setattr(torch, "seed", seed)
    monkeypatch.setattr(torch.random, "seed", seed)


class Reseeded(nn.Module):
    """Draws a seed for its dropout, and stores it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drawn = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.drawn = torch.seed()
        torch.manual_seed(self.drawn % 1000)
        return F.dropout(self.linear(x), 0.3, self.training)


class Recomputed(torch.autograd.Function):
    """Saves only its input, and draws the same dropout in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Reseeded, uses: int) -> Tensor:
        ctx.layer, ctx.uses = layer, uses
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        for _ in range(ctx.uses):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                torch.manual_seed(ctx.layer.drawn % 1000)
                y = F.dropout(ctx.layer.linear(x), 0.3, ctx.layer.training)
                y.backward(tangents[0])
        return x.grad, None, None


class Reversible(nn.Module):
    def __init__(self, uses: int = 1) -> None:
        super().__init__()
        self.layer, self.uses = Reseeded(), uses

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Recomputed.apply(x, self.layer, self.uses)  # type: ignore[no-untyped-call]
        return y


@pytest.mark.long
@pytest.mark.parametrize("part", [Reseeded, Reversible])
@pytest.mark.parametrize("accumulates", [False, True])
def test_seeds_of_forward_are_those_of_its_second_run(part: type[nn.Module], accumulates: bool) -> None:
    compiled, ours, theirs = beside_eager(lambda: Net(part()), accumulates=accumulates)
    assert [opaque.path for opaque in compiled.plans[0].opaque] == ["part"]
    layers = [next(m for m in net.modules() if isinstance(m, Reseeded)) for net in (ours, theirs)]
    assert layers[0].drawn == layers[1].drawn != 0


def test_a_layer_that_differentiates_twice_is_refused() -> None:
    with pytest.raises(memgraph.CaptureError, match="several gradients of a parameter by itself"):
        memgraph.compile(Net(Reversible(uses=2)), ROOM)(batch(0)).backward()


@pytest.mark.long
def test_a_reformer_is_captured_but_for_its_encoder() -> None:
    from benchmarks.zoo.models.text import reformer

    training = reformer()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def forward(self, x: Tensor) -> Any:
            return self.model(**training.kwargs).loss + 0.0 * x.sum()

    compiled, _, _ = beside_eager(Loss)
    assert [part.path for part in compiled.plans[0].opaque] == ["model.reformer.encoder"]


def test_known_seeds_come_first_and_all_are_recorded() -> None:
    with entropy_seeds() as seeds:
        drawn = torch.seed(), torch.rand(()), torch.random.seed()
    with entropy_seeds(seeds[:1]) as again:
        assert (torch.seed(), torch.rand(())) == drawn[:2]
        assert torch.seed() == drawn[2]
    assert seeds == again == [drawn[0], drawn[2]]
