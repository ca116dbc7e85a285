"""Ops that no slice may cut, and steps without any that may: results and gradients are eager's."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memgraph
from memgraph.slices.sliced_graph import sliced_graph
from tests.support.compare import same_gradients
from tests.support.sliced_models import Headed, Heads, cross_entropy
from tests.support.sliced_training import ROOM, assert_kept, batch, beside_eager, budget_of, headed, step


class Normed(nn.Module):
    """Batch norm, which mixes rows and changes buffers, between wide layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 128), nn.BatchNorm1d(128)
        self.down, self.drop, self.head = nn.Linear(128, 8), nn.Dropout(0.2), nn.Linear(8, 96)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(self.down(self.norm(self.up(x)).relu()))
        return torch.nn.functional.cross_entropy(self.head(x), labels)


@pytest.mark.long
@pytest.mark.parametrize("slices", ["auto", {"head": 3}, {"up": 2}, {"norm": 2}, {"down": 4}], ids=str)
def test_a_batch_norm_is_not_cut(slices: Any) -> None:
    torch.manual_seed(0)
    module = Normed()
    x, labels = torch.randn(128, 8), torch.randint(96, (128,))

    def run(model: Any) -> Tensor:
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            losses.append(model(x, labels))
            losses[-1].backward()
        return torch.stack([*losses, *(b.double().sum() for b in model.buffers())]).detach()

    try:
        model = beside_eager(module, run, budget=ROOM, slices=slices)
    except ValueError as error:
        assert "which has no ops left that can run in parts" in str(error)
    else:
        ops = {op.name: op for op in model.plan.forecast.trace.ops}
        assert not any("batch_norm" in ops[name].fn for cut in model.plan.slices for name in cut.rule if name in ops)


def test_a_loss_that_forward_uses_twice() -> None:
    """The loss and its square: what scales the gradients is no tangent of 1."""

    class Squared(Headed):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            loss = super().forward(tokens, labels)
            return loss + 0.5 * loss.square()

    torch.manual_seed(0)
    beside_eager(Squared(cross_entropy), budget=ROOM, slices={"head": 4})


class Decayed(torch.autograd.Function):
    """The identity, whose gradient has a part that does not depend on the tangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] + 0.1 * x


@pytest.mark.long
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_gradient_that_is_not_proportional_to_the_tangent(factor: float) -> None:
    class Own(Headed):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return self.loss(Decayed.apply(self.head(self.norm(self.embedding(tokens)))), labels)  # type: ignore

    def scaled(model: Any) -> Tensor:
        loss = factor * model(*batch())
        loss.backward()
        return loss.detach()

    torch.manual_seed(0)
    beside_eager(Own(cross_entropy), scaled, budget=ROOM, slices={"head": 4})


def test_a_step_that_fits_or_has_no_chain_is_as_it_was() -> None:
    module = headed()
    assert not beside_eager(module, budget=ROOM).plan.slices
    x = torch.randn(5, 8)
    small = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    twin = copy.deepcopy(small)
    model = memgraph.compile(small, 20_000, slices="auto")
    for each in (model, twin):
        each(x).square().mean().backward()
    assert same_gradients(small, twin) and not model.plan.slices


def refused(monkeypatch: pytest.MonkeyPatch, count: int) -> list[Any]:
    """Let torch not run the first slices that are asked for in parts, and return what is asked for."""
    asked = list[Any]()

    def failing(graph: Any, unrolled: Any) -> Any:
        asked.append(unrolled)
        if len(asked) <= count:
            with FakeTensorMode():
                torch.ones(5).unfold(0, 8, 4)
        return sliced_graph(graph, unrolled)

    monkeypatch.setattr("memgraph.slices.step_slices.sliced_graph", failing)
    return asked


def test_a_slice_that_torch_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Heads()
    budget = budget_of(module, 0.8)
    assert len(beside_eager(copy.deepcopy(module), budget=budget).plan.slices) == 2
    asked = refused(monkeypatch, 1)
    model = beside_eager(module, budget=budget)
    assert len(asked) == 2 and len(model.plan.slices) == 1
    assert_kept(model)


def test_a_step_of_which_torch_runs_no_slice_is_planned_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    module = headed()
    eager = copy.deepcopy(module)
    asked = refused(monkeypatch, 100)
    model = memgraph.compile(module, budget_of(module, 0.95), slices="auto", offload=None)
    assert torch.equal(step(model), step(eager)) and same_gradients(module, eager)
    assert asked and not model.plan.slices


def test_a_submodule_whose_ops_torch_does_not_run_in_parts_is_named_and_nothing_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused(monkeypatch, 1)
    with pytest.raises(ValueError, match="slices has 'head', but torch can't run its ops in 4 parts: maximum size for"):
        step(memgraph.compile(headed(), ROOM, slices={"head": 4}))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
