"""Select the outputs whose backward is planned, and handle losses of other outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.capture.capture import capture
from memgraph.tensors.loss_outputs import select_losses

ROOM = "1GB"


class Returning(nn.Module):
    """Two layers, and any function of what they make."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).tanh()
        return self.function(h, self.head(h))


def logits_and_penalty(h: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits, h.square().mean()


def loss_and_shares(h: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    return h.square().mean(), logits.softmax(-1)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("function", "places"),
    [
        (logits_and_penalty, (0, 1)),
        (lambda h, logits: (logits, logits.view(-1).square().mean(), h), (1,)),
        (lambda h, logits: (logits.square().mean(), h.mean()), (0, 1)),
        (lambda h, logits: (logits, h), (0, 1)),
        (lambda h, logits: (logits.detach(), h.sum()), (1,)),
        (lambda h, logits: (logits.square().mean(), logits.softmax(-1), h[:, ::2].exp()), (0,)),
        (lambda h, logits: (h.mean(), logits.softmax(-1)), (0, 1)),
    ],
)
def test_wanted_are_scalars_and_what_has_parameters_of_its_own(
    function: Callable[..., Any], places: tuple[int, ...]
) -> None:
    assert capture(Returning(function), (batch(),), {}, wanted=select_losses).tangents == places


def losses_of(module: Any, loss: Callable[[Any], Tensor], count: int = 3) -> tuple[list[Tensor | None], int]:
    """The gradients of some steps, and the warnings that there were."""
    found: list[Tensor | None] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(count):
            loss(module(batch(seed))).backward()
            found += [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            module.zero_grad()
    return found, len(caught)


def assert_alike(function: Callable[..., Any], loss: Callable[[Any], Tensor], warned: int) -> memgraph.CompiledModule:
    torch.manual_seed(0)
    module = Returning(function)
    theirs, _ = losses_of(module, loss)
    compiled = memgraph.compile(module, ROOM)
    ours, count = losses_of(compiled, loss)
    for their, our in zip(theirs, ours, strict=True):
        assert (their is None) == (our is None)
        assert their is None or our is None or torch.equal(their, our)
    assert count == warned
    return compiled


def test_a_loss_of_logits_beside_a_penalty_is_within_the_plan_at_once() -> None:
    def loss(result: Any) -> Tensor:
        total: Tensor = F.cross_entropy(result[0], torch.arange(6)) + 0.1 * result[1]
        return total

    compiled = assert_alike(logits_and_penalty, loss, warned=0)
    module = Returning(logits_and_penalty)
    assert memgraph.plan(module, batch(), budget=ROOM).peak == compiled.plan.peak


def test_what_is_computed_from_logits_beside_their_loss_is_only_looked_at() -> None:
    assert_alike(lambda h, logits: (logits.mean(), logits.softmax(-1)), lambda result: result[0], warned=0)


def test_a_head_that_no_loss_is_made_of_is_left_out_without_a_warning() -> None:
    """The first step keeps its budget too: its backward drops the head's part."""
    assert_alike(loss_and_shares, lambda result: result[0], warned=0)


def test_logits_of_a_tied_head_beside_a_penalty_are_wanted() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.embedding(x).tanh()
            return h @ self.embedding.weight.t(), h.square().mean()

    assert capture(Tied(), (torch.arange(6),), {}, wanted=select_losses).tangents == (0, 1)


def test_an_output_that_no_loss_is_made_of_beside_a_scalar_brings_no_nan() -> None:
    assert_alike(lambda h, logits: (h.mean(), (logits * 0).sqrt()), lambda result: result[0], warned=0)


def test_losses_that_are_made_now_of_these_outputs_and_now_of_those() -> None:
    turns = iter([0, 1, 1, 0, 1, 1])
    assert_alike(loss_and_shares, lambda result: result[next(turns)].square().sum(), warned=1)
