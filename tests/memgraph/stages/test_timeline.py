"""A stage recomputes before its gradient comes, and `checkpoint=` says how much is recomputed at all."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.stages.stage_runs import ActionTimes
from passes.stages.action import BACKWARD
from tests.support.ranks import on_ranks
from tests.support.staged_models import in_turn, made, wide

SLOW = 0.4  # seconds


@torch.library.custom_op("memgraph_tests::slow", mutates_args=())
def slow(x: Tensor) -> Tensor:
    time.sleep(SLOW)
    return x.clone()


@torch.library.custom_op("memgraph_tests::slow_backward", mutates_args=())
def slow_backward(x: Tensor) -> Tensor:
    return x.clone()


slow.register_fake(torch.empty_like)
slow_backward.register_fake(torch.empty_like)
slow_backward.register_autograd(lambda _, gradient: slow(gradient))


class LateGradient(nn.Module):
    """Layers whose gradient comes late: the last op takes its time in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return slow_backward(x).square().mean()


def _timeline(rank: int) -> tuple[int, list[ActionTimes]]:
    """Return how many values each backward recomputes first, and its times on the clock of the machine."""
    torch.manual_seed(0)
    pipe = memgraph.pipeline(LateGradient(), "1GB", 3, checkpoint="always")
    batch = torch.randn(48, 64)
    for _ in range(2):
        pipe.step(batch)
    first = pipe._latest.stages[rank][0].recompute
    rows = [row for row in pipe.timeline if row.action.kind == BACKWARD]
    return len(first.outputs) if first is not None else 0, rows


@pytest.mark.long
def test_a_stage_has_recomputed_before_its_gradient_can_come() -> None:
    (recomputes, first), (_, last) = on_ranks(2, _timeline)
    assert (recomputes > 0, len(first), len(last)) == (True, 3, 3)
    for early, late in zip(first, last, strict=True):
        assert early.recomputed < late.begin + SLOW < early.received <= early.end


MODES = {"always": [True, True, True], "except_last": [True, True, False], "never": [False] * 3, "auto": [False] * 3}


def _modes(rank: int, mode: str, name: str, schedule: str) -> tuple[list[bool], list[str]]:
    """Return which micro-batches recompute anything, and the parameters with other gradients."""
    model, batch = wide(6) if name == "wide" else made(name, 6)
    plain, _ = in_turn(model, batch, 3)
    pipe = memgraph.pipeline(model, "1GB", 3, checkpoint=mode, schedule=schedule)
    pipe.step(**batch)
    wanted = dict(plain.named_parameters())
    wrong = [key for key, value in pipe.named_parameters() if not torch.equal(value.grad, wanted[key].grad)]  # type: ignore[arg-type]
    stages = zip(*pipe._latest.stages.values(), strict=True)
    return [any(stage.plan.choice.plan for stage in each) for each in stages], wrong


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, schedule", [("gpt2", "1f1b"), ("batch norm", "interleaved"), ("wide", "zero_bubble")])
def test_checkpoint_says_which_micro_batches_are_recomputed(mode: str, name: str, schedule: str) -> None:
    for recomputes, wrong in on_ranks(2, _modes, mode, name, schedule):
        assert (recomputes, wrong) == (MODES[mode], [])


def _counted(rank: int) -> list[bool]:
    model, batch = made("gpt2", 2)
    pipe = memgraph.pipeline(model, "1GB", 8, checkpoint="except_last")
    pipe.step(**batch)
    return [bool(stage.plan.choice.plan) for stage in pipe._latest.stages[rank]]


@pytest.mark.long
def test_the_last_micro_batch_is_the_last_that_there_is() -> None:
    assert on_ranks(2, _counted) == [[True, False]] * 2


def test_a_balance_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 entries for 1 stages"):
        memgraph.pipeline(nn.Linear(2, 2), "1GB", balance=[0, 3])


@pytest.mark.parametrize(
    "given, words",
    [
        ({"checkpoint": "sometimes"}, "except_last"),
        ({"stages_per_rank": 2}, "interleaved"),
        ({"schedule": "interleaved", "stages_per_rank": 0}, "at least 1"),
        ({"schedule": "interleaved", "stages_per_rank": True}, "at least 1"),
    ],
)
def test_what_can_not_be_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        memgraph.pipeline(nn.Linear(2, 2), "1GB", **given)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"optimizer": torch.optim.SGD([torch.ones(1)], 0.1)}, "optimizer is a SGD; give a function"),
        ({"loss": torch.ones(1)}, "loss is a Tensor; give a function"),
        ({"replicated": [1.5]}, "replicated has 1.5"),
    ],
)
def test_a_value_of_another_type_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        memgraph.pipeline(nn.Linear(2, 2), "1GB", **given)
