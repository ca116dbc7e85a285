"""Schedules, numbers of micro-batches, offloading, cuts and dropout in random combinations: the gradients of the plain
model, to the bit."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from passes import Offload
from passes.stages.pipeline_schedule import SCHEDULES
from tests.support.forced_plans import offloading
from tests.support.ranks import on_ranks
from tests.support.staged_models import Batch, in_turn, made

CHUNKS = (1, 2, 3, 7, 10)
MODELS = ("dropout", "batch norm", "skips", "frozen")
MODES = ((True, "auto"), (True, "auto"), (False, "auto"), (False, "always"), (False, "except_last"), (False, "never"))


class Case(NamedTuple):
    """One combination."""

    model: str
    schedule: str
    chunks: int
    rows: int
    offloads: bool
    checkpoint: str
    is_cut_best: bool


class Dropped(nn.Module):
    """Layers with dropout, and a skip over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = F.dropout(layer(x).tanh(), 0.2, self.training)
        return F.mse_loss(x + first, y)


def _cases(seed: int, count: int) -> list[Case]:
    """Return random cases, in which each model, schedule and mode comes before one comes again."""
    draw = random.Random(seed)
    models, schedules = draw.sample(MODELS, len(MODELS)), draw.sample(SCHEDULES, len(SCHEDULES))
    modes = draw.sample(MODES, len(MODES))
    cases = []
    for i in range(count):
        chunks, mode = draw.choice(CHUNKS), modes[i % len(modes)]
        rows, is_best = chunks + draw.randrange(2 * chunks + 1), draw.random() < 0.7
        cases.append(Case(models[i % len(models)], schedules[i % len(schedules)], chunks, rows, *mode, is_best))
    return cases


def _made(case: Case) -> tuple[nn.Module, Batch]:
    if case.model != "dropout":
        return made(case.model, case.rows)
    torch.manual_seed(0)
    return Dropped(), {"x": torch.randn(case.rows, 8), "y": torch.randn(case.rows, 8)}


def _wrong(rank: int, cases: list[Case]) -> list[list[Any]]:
    """Return for each case the parameters with other gradients, and whether this rank offloads."""
    return [_trained(case) for case in cases]


def _trained(case: Case) -> list[Any]:
    model, batch = _made(case)
    plain, _ = _made(case)
    with pytest.MonkeyPatch.context() as patch:
        if case.offloads:
            offloading(patch)
        given: dict[str, Any] = {"schedule": case.schedule, "checkpoint": case.checkpoint}
        pipe = memgraph.pipeline(model, "1GB", case.chunks, **given)
        pipe.prepare(**batch)
        if not case.is_cut_best:
            begins = pipe._cut.cut.begins
            places = pipe._cut.cut.step.costs.borders[:-1]
            moved = [0, *(places[max(stage, places.index(begins[stage]) - 1)] for stage in range(1, len(begins)))]
            model = _made(case)[0]
            pipe = memgraph.pipeline(model, "1GB", case.chunks, balance=moved, **given)
            pipe.prepare(**batch)
        for step in range(2):  # the second adds to the gradients of the first
            torch.manual_seed(step)
            plain, _ = in_turn(plain, batch, case.chunks)
            torch.manual_seed(step)
            pipe.step(**batch)
        pipe.module.eval()
        with torch.no_grad():
            pipe.step(**batch)
    wanted = dict(plain.named_parameters())
    wrong = [name for name, each in pipe.named_parameters() if not torch.equal(each.grad, wanted[name].grad)]  # type: ignore[arg-type]
    _, trained = pipe._plans._plans[0]
    plans = [stage.plan.choice.plan for stages in trained.stages.values() for stage in stages]
    return [wrong, any(isinstance(each, Offload) for plan in plans for each in plan)]


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, seed, count",
    [(2, 0, 6), (3, 2, 4), *(pytest.param(2 + i % 2, i, 12, marks=pytest.mark.slow) for i in range(2, 6))],
)
def test_random_combinations_have_the_gradients_of_the_plain_model(ranks: int, seed: int, count: int) -> None:
    cases = _cases(seed, count)
    offloaded = False
    for found in on_ranks(ranks, _wrong, cases, seconds=360):
        for case, (wrong, offloads) in zip(cases, found, strict=True):
            assert wrong == [], case
            assert not offloads or case.offloads, case
            offloaded = offloaded or offloads
    assert offloaded
