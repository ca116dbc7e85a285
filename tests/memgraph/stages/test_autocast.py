"""Under autocast a parameter is cast before it is read; a stage that makes its gradient has it all the same."""

from __future__ import annotations

import copy

import pytest
import torch

import memgraph
from memgraph.stages.stage_cut import StageCut
from memgraph.stages.whole_step import whole_step
from tests.support.ranks import on_ranks
from tests.support.staged_models import loss_of, made


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "t5", "batch norm"])
@pytest.mark.parametrize("enabled", [False, True])
def test_no_border_parts_a_gradient_from_its_parameter(name: str, enabled: bool) -> None:
    model, batch = made(name, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        step = whole_step(model, (), batch)
    borders = step.costs.borders[1:-1]
    assert len(borders) >= 16
    for border in borders:
        cut = StageCut(step, (0, border))
        for stage, trace in enumerate(cut.traces):
            assert set(cut.gradient_names(trace)) <= cut.tensors(stage)


def _gradients(rank: int, schedule: str) -> list[str]:
    model, batch = made("gpt2", 6)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        memgraph.pipeline(model, "1GB", 3, schedule=schedule).step(**batch)
        for each in zip(*(value.chunk(3) for value in batch.values()), strict=True):
            (loss_of(plain(**dict(zip(batch, each, strict=True)))) / 3).backward()
    wanted = dict(plain.named_parameters())
    own = {name: each for name, each in model.named_parameters() if not each.is_meta}
    return [name for name, each in own.items() if not torch.equal(each.grad, wanted[name].grad)]  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_gradients_under_autocast_are_those_of_eager(schedule: str) -> None:
    assert on_ranks(2, _gradients, schedule) == [[]] * 2
