"""Optimizers of stages: scaled losses, schedules of the learning rate, a stage without parameters to train."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from tests.support.ranks import on_ranks
from tests.support.staged_models import in_turn, made

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def _scaled(rank: int, bad: int) -> tuple[list[float], list[str]]:
    """Return the scale after each step, and the parameters that differ from those of eager; rank `bad` has an infinity."""
    model, batch = made("gpt2", 4)
    plain, _ = made("gpt2", 4)
    pipe = memgraph.pipeline(model, "1GB", 2, optimizer=SGD)
    pipe.prepare(**batch)
    theirs = SGD(plain.parameters())
    assert pipe.optimizer is not None
    kind = {"init_scale": 64.0, "growth_interval": 2}
    scaler = memgraph.GradScaler("cpu", group=torch.distributed.group.WORLD, **kind)
    reference = torch.amp.GradScaler("cpu", **kind)  # type: ignore[arg-type]
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (pipe.optimizer, theirs)]
    scales = []
    for step in range(5):
        pipe.scale_loss(scaler)
        pipe.step(**batch)
        gradients, _ = in_turn(plain, batch, 2)
        for mine, each in zip(plain.parameters(), gradients.parameters(), strict=True):
            assert each.grad is not None
            mine.grad = reference.scale(each.grad)
        if step == 1:
            plain.get_parameter("transformer.wte.weight").grad.fill_(float("inf"))  # type: ignore[union-attr]
            if rank == bad:
                next(pipe.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        for one, optimizer in ((scaler, pipe.optimizer), (reference, theirs)):
            one.unscale_(optimizer)
            one.step(optimizer)
            one.update()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        scales.append(scaler.get_scale())
        assert scaler.get_scale() == reference.get_scale()
    wanted = dict(plain.named_parameters())
    return scales, [name for name, each in pipe.named_parameters() if not torch.equal(each, wanted[name])]


@pytest.mark.long
def test_an_infinity_in_one_stage_counts_in_all() -> None:
    for bad in (0, 1):
        assert on_ranks(2, _scaled, bad) == [([64.0, 32.0, 32.0, 64.0, 64.0], [])] * 2


def _scaled_alone(rank: int) -> list[str]:
    pipe = memgraph.pipeline(made("skips", 4)[0], "1GB", 2)
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    assert isinstance(alone, torch.distributed.ProcessGroup)
    found = []
    for scaler in (torch.amp.GradScaler("cpu"), memgraph.GradScaler("cpu"), memgraph.GradScaler("cpu", group=alone)):
        with pytest.raises(ValueError, match=r"has to count on ranks \[0, 1\]") as caught:
            pipe.scale_loss(scaler)
        found.append(str(caught.value).partition("scaler has ")[2].partition(";")[0])
    pipe.scale_loss(torch.amp.GradScaler("cpu", enabled=False))
    return found


def test_a_scaler_of_other_ranks_is_refused() -> None:
    assert on_ranks(2, _scaled_alone) == [["no group"] * 2 + [f"a group of ranks [{rank}]"] for rank in (0, 1)]


class FrozenHalf(nn.Module):
    """The first layers need no gradient, and are a stage of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8).requires_grad_(i > 3) for i in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(x, y)


def _empty(rank: int) -> tuple[int, float]:
    torch.manual_seed(0)
    pipe = memgraph.pipeline(FrozenHalf(), "1GB", 2, optimizer=SGD)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    norm = torch.empty(())
    for _ in range(2):
        pipe.step(x, y)
        norm = pipe.clip_grad_norm_(1.0)
        assert pipe.optimizer is not None
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
    return len(list(pipe.parameters())), norm.item()


def test_a_stage_without_parameters_to_train_steps_with_the_others() -> None:
    (none, norm), (some, other) = on_ranks(2, _empty)
    assert (none + some, norm) == (4, other)
    assert norm > 0
