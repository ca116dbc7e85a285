"""Recorded steps on a GPU: bits as eager's, copies in the recording, and the budget kept."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from benchmarks.blocks import SHAPES, Stack
from memgraph.planning import replan, search
from passes.schedule.schedule import Placement
from tests.support.forced_plans import all_given_up, given_up

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")]
GPU = torch.device("cuda", 0)
STEPS = 6


def subject(name: str) -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    with GPU:
        return Stack(SHAPES[name].toy()), torch.randn(16, 64, 64)


def trained(model: nn.Module, called: Any, x: Tensor) -> list[Tensor]:
    """Losses, gradients and at last the parameters of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    facts = []
    for step in range(STEPS):
        loss = called(x * (step + 1))
        loss.backward()
        facts += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*facts, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "plan", [None, given_up(Placement.OFFLOAD_BLOCKING), all_given_up], ids=["plain", "offload", "mixed"]
)
def test_replays_are_eager_to_the_bit(name: str, plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if plan is not None:
        monkeypatch.setattr(search, "make_plan", plan)
        monkeypatch.setattr(replan, "replanned", lambda *_: None)
    (plain, x), (model, _) = subject(name), subject(name)
    ours = memgraph.compile(model, "8GB", lower=None, cuda_graphs=True)
    assert all(map(torch.equal, trained(model, ours, x), trained(plain, plain, x)))
    replays = ours._latest.cuda_graphs
    assert replays.recording is not None and replays.recording.replays > 1
    assert ours.plan.measured is not None and ours.plan.measured <= ours.plan.peak


def test_a_recorded_step_keeps_the_budget_between_steps_too() -> None:
    model, x = subject("llama-8b")
    with pytest.raises(memgraph.BudgetError) as error:
        memgraph.plan(model, x, budget=1, lower=None, cuda_graphs=True)
    ours = memgraph.compile(model, int(error.value.smallest * 1.05), lower=None, cuda_graphs=True)
    trained(model, ours, x)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours(x).backward()
    assert torch.cuda.max_memory_allocated() - before <= ours.plan.budget


def test_dropout_draws_what_eager_draws() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)).to(GPU)

    plain, model = net(), net()
    ours = memgraph.compile(model, "8GB", lower=None, cuda_graphs=True, loss=lambda y: y.square().mean())
    x = torch.ones(8, 64, device=GPU)
    for seed in range(STEPS):
        torch.manual_seed(seed)
        found = ours(x)
        torch.manual_seed(seed)
        expected = plain(x).square().mean()
        found.backward()
        expected.backward()
        assert torch.equal(found, expected)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
        model.zero_grad()
        plain.zero_grad()
