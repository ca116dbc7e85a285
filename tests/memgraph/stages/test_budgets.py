"""No rank exceeds its forecast, nor its budget; a second meter counts each of them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memgraph
from memgraph import StagesBudgetError
from memgraph.stages.stage_plans import MiniBatchPlanner
from passes.stages.pipeline_schedule import SCHEDULES
from tests.support.allocator_meter import compiler, preloaded
from tests.support.ranks import on_ranks
from tests.support.staged_models import in_turn, made, wide

CASES = [
    ("3", "4", "1f1b", "tied", "1.0"),
    ("2", "4", "interleaved", "wide", "0"),
    ("3", "4", "zero_bubble", "wide", "0.6"),
]
FURTHER = [
    ("2", "4", "1f1b", "wide", "0.6"),
    ("2", "4", "interleaved", "wide", "0.6"),
    ("2", "3", "interleaved", "t5", "0"),
    ("1", "3", "interleaved", "u-net", "0"),
    ("2", "4", "1f1b", "u-net", "0"),
    ("3", "4", "gpipe", "wide", "0.6"),
    ("2", "4", "1f1b", "batch norm", "1.0"),
]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in FURTHER]


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="the second meter needs a C compiler")
@pytest.mark.parametrize("case", [*CASES, *SLOW], ids=" ".join)
def test_each_rank_keeps_its_budget(tmp_path: Path, case: tuple[str, ...]) -> None:
    child = [sys.executable, "-m", "tests.support.counted_stages", *case]
    output = subprocess.run(child, env=preloaded(tmp_path), capture_output=True, text=True, timeout=300)
    assert output.returncode == 0, output.stderr
    rows = [json.loads(line) for line in output.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == int(case[0])
    for row in rows:
        assert row["kept"] < max(row["counted"]) <= row["forecast"] <= row["budget"]
        assert row["evaluated"][0] < max(row["counted"])
        for counted, forecast in (row["uneven"], row["evaluated"]):
            assert row["kept"] / 2 < counted <= forecast <= row["budget"]


def _tight(rank: int, schedule: str) -> list[Any]:
    """Return the smallest budgets as an error gives them, and the parameters with other gradients under these."""
    model, batch = wide(8)
    plain, _ = in_turn(model, batch, 4)
    with pytest.raises(StagesBudgetError) as caught:
        memgraph.pipeline(model, "300KB", 4, schedule=schedule).step(**batch)
    smallest = caught.value.smallest
    pipe = memgraph.pipeline(model, smallest, 4, schedule=schedule)
    pipe.step(**batch)
    wanted = dict(plain.named_parameters())
    wrong = [key for key, value in pipe.named_parameters() if not value.grad.equal(wanted[key].grad)]  # type: ignore[union-attr, arg-type]
    is_planned = any(stage.plan.choice.plan for stages in pipe._latest.stages.values() for stage in stages)
    return [smallest, wrong, f"give budget={smallest}" in str(caught.value), pipe.peak <= smallest[rank], is_planned]


def _uneven(rank: int) -> tuple[bool, bool]:
    """Return whether this rank recomputes under a budget for even micro-batches, and keeps it for uneven ones."""
    model, batch = wide(32)
    loose = memgraph.pipeline(wide(32)[0], "1GB", 4)
    loose.prepare(**batch)
    share = json.dumps(int(0.7 * loose.peak)).encode()
    budgets = [json.loads(text) for text in loose.group.share(share, "budgets")]
    pipe = memgraph.pipeline(model, budgets, 4)
    pipe.prepare(**batch)
    recomputes = any(stage.plan.choice.plan for stages in pipe._latest.stages.values() for stage in stages)
    pipe.prepare(**{key: value[:30] for key, value in batch.items()})
    return recomputes, pipe.peak <= budgets[rank]


@pytest.mark.long
def test_a_smaller_last_micro_batch_fits_where_the_others_do() -> None:
    results = on_ranks(2, _uneven)
    assert results[0] == (True, True) and results[1][1]


def _free(rank: int) -> list[int]:
    model, batch = made("gpt2", 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memgraph.system.byte_sizes.unused_nbytes", lambda device: 10**9 + rank)
        pipe = memgraph.pipeline(model, chunks=2)
    pipe.step(**batch)
    return [*pipe.given.budgets]


@pytest.mark.long
def test_an_error_says_which_stages_need_how_much() -> None:
    model, batch = made("skips", 8)
    with pytest.raises(StagesBudgetError) as caught:
        memgraph.pipeline(model, 1000, 2, schedule="interleaved", stages_per_rank=3).prepare(**batch)
    (least,) = caught.value.smallest
    assert str(caught.value).startswith(
        f"no plan keeps the budgets of 3 stages: stages 0, 1, 2 need {least} bytes, and 1000 are allowed; "
        f"give budget=[{least}], or more chunks"
    )
    pipe = memgraph.pipeline(made("skips", 8)[0], least, 2, schedule="interleaved", stages_per_rank=3)
    pipe.step(**batch)
    assert pipe.peak <= least


def _evaluated(rank: int) -> list[Any]:
    """Return the budgets that evaluation under the smallest ones of training asks for, and its forecasts there."""

    def prepared(budgets: Any, balance: Any = None) -> Any:
        model, batch = made("frozen", 16)
        pipe = memgraph.pipeline(model, budgets, 4, balance=balance, optimizer=torch.optim.AdamW)
        pipe.prepare(**batch)
        with torch.no_grad():
            pipe.prepare(**batch)
        return pipe

    with pytest.raises(StagesBudgetError) as caught:
        prepared("1KB")
    with pytest.raises(StagesBudgetError) as again:
        prepared(caught.value.smallest)
    error = pickle.loads(pickle.dumps(again.value))
    assert caught.value.balance is None and error.budget == caught.value.smallest
    return [error.smallest, [*prepared(error.smallest, error.balance)._latest.peaks]]


def test_budgets_that_evaluation_asks_for_work_for_training_too() -> None:
    for budgets, peaks in on_ranks(2, _evaluated):
        assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))


def _in_step(rank: int) -> list[Any]:
    """Return loss and forecasts of an evaluation, once with plans that a search finds and once without a search."""
    found = []
    for patched in (False, True):
        model, batch = wide(64)
        pipe = memgraph.pipeline(model, "64MB", 4)
        pipe.prepare(**batch)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            if patched:
                patch.setattr(MiniBatchPlanner, "searched", lambda *_: None)
            loss = pipe.step(**batch)
        plan = pipe._latest
        found.append((None if loss is None else loss.item(), plan.peaks, plan.schedule.runs_ahead))
    return found


@pytest.mark.long
def test_the_smallest_plans_of_an_evaluation_wait_for_each_message() -> None:
    for (loss, peaks, runs_ahead), (same, less, keeps_step) in on_ranks(2, _in_step):
        assert (same, runs_ahead, keeps_step) == (loss, True, False)
        assert less[0] < peaks[0]


def test_without_a_budget_each_rank_has_what_is_free_there() -> None:
    first, last = on_ranks(2, _free)
    assert (first == last, first[1] - first[0]) == (True, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule", ["zero_bubble", *(pytest.param(each, marks=pytest.mark.slow) for each in SCHEDULES[:3])]
)
def test_the_smallest_budgets_work_with_equal_gradients(schedule: str) -> None:
    results = on_ranks(2, _tight, schedule)
    assert results[0][0] == results[1][0]
    assert [each[1:4] for each in results] == [[[], True, True]] * 2
    assert any(each[4] for each in results)
