"""The report of a pipeline: each rank's bytes, the time of a mini-batch, and a bound of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memgraph
from tests.support.ranks import on_ranks
from tests.support.staged_models import wide

BUDGET = 1_200_000


def _reported(rank: int, schedule: str) -> list[Any]:
    model, batch = wide(8)
    pipe = memgraph.pipeline(model, BUDGET, 4, schedule=schedule, optimizer=torch.optim.AdamW)
    pipe.prepare(**batch)
    before = pipe.report.measured
    found = []
    for _ in range(3):  # the optimizer has states from the second step on
        pipe.step(**batch)
        found.append(pipe.report.measured)
        assert pipe.optimizer is not None
        pipe.optimizer.step()
    report = pipe.report
    return [before, found, report.peaks, report.us, report.least_us, str(report)]


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_report_has_the_bytes_of_each_rank_and_a_bound_of_the_time(schedule: str) -> None:
    results = on_ranks(2, _reported, schedule)
    for rank, (before, (first, second, third), peaks, us, least, text) in enumerate(results):
        assert before is None
        assert peaks[rank] / 2 < first < second == third <= peaks[rank] <= BUDGET
        assert f"{schedule}, 2 stages on 2 ranks, 4 micro-batches" in text
        assert "measured" in text and "the ranks wait" in text
        if schedule == "1f1b":
            assert us / 3 < least <= us
        assert ("takes at least" in text) == (least is not None) == (schedule == "1f1b")
    assert results[0][2] == results[1][2]
