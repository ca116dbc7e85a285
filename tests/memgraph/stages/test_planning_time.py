"""Stages are searched for plans once they are cut; until then the quick passes alone run."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

import memgraph
from memgraph import StagesBudgetError
from memgraph.stages import stage_search, step_capture
from memgraph.stages.rank_planner import RankPlanner
from memgraph.stages.stage_planner import StagePlanner
from memgraph.stages.stage_plans import MiniBatchPlanner
from memgraph.stages.whole_step import WholeStep, whole_step
from passes import Machine, PlanResult, Trace, make_plan
from passes.concurrent_forwards import fitting_beside, fitting_forwards, open_forward_nbytes, unplanned_nbytes
from tests.passes.stages.test_cut import chain, quick
from tests.support.ranks import on_ranks
from tests.support.staged_models import made, wide


def _searches(rank: int, budgets: Any, time_limit: float | None) -> tuple[int, bool, list[int]]:
    """Return how often this rank has searched, with any time left, and the forecasts."""
    searched = []

    def counted(trace: Trace, machine: Machine, seconds: float) -> PlanResult:
        searched.append(seconds)
        return make_plan(trace, machine, seconds=seconds)

    model, batch = wide(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_search, "make_plan", counted)
        pipe = memgraph.pipeline(model, budgets, 4, time_limit=time_limit)
        pipe.prepare(**batch)
    return len(searched), any(seconds > 0 for seconds in searched), [*pipe._latest.peaks]


def _smallest(rank: int, name: str, rows: int, chunks: int) -> list[int]:
    model, batch = wide(rows) if name == "wide" else made(name, rows)
    with pytest.raises(StagesBudgetError) as caught:
        memgraph.pipeline(model, "2KB", chunks).prepare(**batch)
    return caught.value.smallest


@pytest.mark.long
def test_each_rank_searches_for_its_own_stage_alone() -> None:
    budgets = on_ranks(2, _smallest, "wide", 8, 4)[0]
    for limit, is_timed in ((None, True), (0.0, False)):
        results = on_ranks(2, _searches, budgets, limit)
        assert [each[0] <= 3 for each in results] == [True, True], results
        assert any(each[1] for each in results) is is_timed
        assert all(peak <= budget for peak, budget in zip(results[0][2], budgets, strict=True))


def _named(rank: int, name: str, rows: int, chunks: int, schedule: str, is_found: bool) -> list[Any]:
    """Return the budgets that an error names, and the forecasts of a process with other prices under these.

    Args:
        is_found: False for a process whose search finds nothing.
    """

    def pipeline(budgets: Any) -> Any:
        model, batch = wide(rows) if name == "wide" else made(name, rows)
        pipe = memgraph.pipeline(model, budgets, chunks, schedule=schedule)
        pipe.prepare(**batch)
        return pipe

    with pytest.raises(StagesBudgetError) as caught:
        pipeline("2KB")
    budgets = caught.value.smallest
    known = WholeStep.measured

    def otherwise(self: WholeStep, us: list[float], *given: Any) -> WholeStep:
        return known(self, [each * 4.0 ** (i * 7 % 5 - 2) for i, each in enumerate(us)], *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeStep, "measured", otherwise)
        if not is_found:
            patch.setattr(MiniBatchPlanner, "searched", lambda *_: None)
        pipe = pipeline(budgets)
    return [budgets, [*pipe._latest.peaks]]


@pytest.mark.long
@pytest.mark.parametrize(
    "name, rows, chunks, schedule, is_found",
    [
        ("wide", 8, 4, "interleaved", False),
        ("wide", 8, 4, "zero_bubble", True),
        pytest.param("gpt2", 7, 3, "1f1b", False, marks=pytest.mark.slow),
    ],
)
def test_budgets_that_an_error_names_work_whatever_is_measured_or_found(
    name: str, rows: int, chunks: int, schedule: str, is_found: bool
) -> None:
    for budgets, peaks in on_ranks(2, _named, name, rows, chunks, schedule, is_found):
        assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))


def _prepared(rank: int, budgets: Any) -> list[int]:
    model, batch = made("t5", 7)
    pipe = memgraph.pipeline(model, budgets, 3)
    pipe.prepare(**batch)
    return [*pipe._latest.peaks]


@pytest.mark.slow
def test_the_smallest_budgets_work_for_micro_batches_whose_ops_differ() -> None:
    budgets = on_ranks(2, _smallest, "t5", 7, 3)[0]
    peaks = on_ranks(2, _prepared, budgets)[0]
    assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))


def _shares(time_limit: float) -> set[float]:
    """Return the shares of the rank's room that were tried for its three stages."""
    model, batch = made("skips", 8)
    tried, known = set[float](), RankPlanner.of_room

    def counted(self: RankPlanner, share: float) -> dict[int, int]:
        tried.add(round(share, 3))
        return known(self, share)

    given: dict[str, Any] = {"schedule": "interleaved", "stages_per_rank": 3}
    with pytest.raises(StagesBudgetError) as caught:
        memgraph.pipeline(model, 1000, 4, **given).prepare(**batch)
    budget = int(1.05 * caught.value.smallest[0])  # with room for a message that waits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankPlanner, "of_room", counted)
        memgraph.pipeline(model, budget, 4, **given, time_limit=time_limit).prepare(**batch)
    return tried


@pytest.mark.long
def test_no_share_between_the_first_and_the_last_is_tried_once_time_is_up() -> None:
    assert _shares(0.0) == {1.0, 0.333}
    assert _shares(math.inf) > {1.0, 0.333}


def _uneven(rank: int) -> list[bool]:
    """Return whether budgets are kept that only another cut than that of even ones keeps."""
    even, found = _smallest(rank, "wide", 8, 4), []
    for budgets in ([int(0.7 * even[0]), 2 * even[1]], [2 * even[0], int(0.7 * even[1])]):
        model, batch = wide(8)
        pipe = memgraph.pipeline(model, budgets, 4, time_limit=0)
        pipe.prepare(**batch)
        found.append(all(peak <= budget for peak, budget in zip(pipe._latest.peaks, budgets, strict=True)))
    return found


@pytest.mark.long
def test_uneven_budgets_get_a_cut_of_their_own_without_any_time() -> None:
    assert on_ranks(2, _uneven) == [[True, True]] * 2


def _planned_stages(capture_s: float) -> int:
    """Return for how many stages the quick passes ran to find the cut, within 50 s, if a capture takes so long."""
    model, batch = wide(8)
    with pytest.raises(StagesBudgetError) as caught:
        memgraph.pipeline(model, 1000, 4).prepare(**batch)
    planned, known, clock, late = list[int](), StagePlanner.times, time.monotonic, [0.0]

    def counted(self: StagePlanner) -> Any:
        planned.append(self.number)
        return known(self)

    def captured(*given: Any) -> WholeStep:
        late[0] = capture_s
        return whole_step(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagePlanner, "times", counted)
        patch.setattr(step_capture, "whole_step", captured)
        patch.setattr(stage_search, "make_plan", lambda trace, machine, seconds: quick(trace, machine))
        patch.setattr(time, "monotonic", lambda: clock() + late[0])
        memgraph.pipeline(model, int(1.1 * caught.value.smallest[0]), 4, time_limit=50.0).prepare(**batch)
    return len(planned)


@pytest.mark.long
def test_a_time_limit_is_one_of_the_whole_call() -> None:
    assert _planned_stages(100.0) == 0
    assert _planned_stages(0.0) > 0


def test_a_forward_beside_larger_ones_holds_no_more_than_they_do() -> None:
    larger, smaller = chain([(100, 4.0)] * 8), chain([(60, 4.0)] * 9)
    budget = int(0.6 * unplanned_nbytes(larger, Machine(0), 3))
    first = fitting_forwards(larger, Machine(budget), 3, None)
    assert first is not None and first.plan
    nbytes = open_forward_nbytes(first.forecast)
    second = fitting_beside(smaller, Machine(budget), 3, nbytes, quick)
    assert second is not None and open_forward_nbytes(second.forecast) <= nbytes


@pytest.mark.parametrize("given, kind", [("soon", TypeError), (-1.0, ValueError)])
def test_a_time_limit_that_is_none_is_refused(given: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="time_limit"):
        memgraph.pipeline(wide(8)[0], "1GB", time_limit=given)
