"""The stages of a rank, ready to run, for each kind of its micro-batches.

stage 0 for 2 rows, and for 1 row; stage 2 for both    ->    plans that fit beside each other
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.rank_bytes import StageBytes

from ..errors import BudgetError
from .mini_batch_plan import largest_peak
from .planned_stage import PlannedStage
from .rank_planner import RankPlanner
from .stage_planner import StagePlanner
from .stage_search import StageSearch

Kind = tuple[tuple[torch.Size, ...], str]  # of a micro-batch: its shapes, and how it is planned
Planners = Mapping[int, Mapping[Kind, StagePlanner]]  # by the numbers of stages
Stages = dict[int, dict[Kind, PlannedStage]]


def rank_stages(
    schedule: PipelineSchedule, number: int, budget: int, planners: Planners, search: StageSearch
) -> tuple[Stages, int]:
    """Return the stages of the rank with this number, and its forecast bytes.

    Raises:
        BudgetError: they don't fit; `smallest` is that of the rank.
    """
    if len(planners) == 1:
        ((stage, by_kind),) = planners.items()
        stages = _planned_together(by_kind, search)
        return {stage: stages}, _stage_peak(by_kind, stages)
    usual = {stage: next(iter(by_kind.values())) for stage, by_kind in planners.items()}
    rank = RankPlanner.of(schedule, number, budget, usual)
    fit, peaks = rank.fitting(), []
    tries = [(rank.equal_parts(), search)] if fit is None else [(fit.budgets, search), (fit.budgets, None)]
    for budgets, each in tries:  # a longer search may find plans that hold more, and do not fit together
        try:
            found = _within(planners, budgets, each)
        except BudgetError:
            continue
        peaks.append(rank.peak({number: _largest(by_kind) for number, by_kind in found.items()}))
        if peaks[-1] <= budget:
            return found, peaks[-1]
    needed = max(rank.smallest(), *peaks[-1:], budget + 1)
    raise BudgetError(f"rank {number} needs {needed} bytes, and {budget} are allowed", budget, needed)


def _within(planners: Planners, budgets: Mapping[int, int], search: StageSearch | None) -> Stages:
    shares = [None] * len(planners) if search is None else search.shares(len(planners))
    return {
        number: _planned_together(
            {kind: each.without_update.within(budgets[number]) for kind, each in by_kind.items()}, share
        )
        for (number, by_kind), share in zip(planners.items(), shares, strict=True)
    }


def _largest(by_kind: Mapping[Kind, PlannedStage]) -> StageBytes:
    return StageBytes.largest([stage.plan.nbytes for stage in by_kind.values()])


def _planned_together(planners: Mapping[Kind, StagePlanner], search: StageSearch | None) -> dict[Kind, PlannedStage]:
    """Return stages whose forwards may be open at once.

    Raises:
        BudgetError: they don't fit together.
    """
    stages: dict[Kind, PlannedStage] = {}
    shares = [None] * len(planners) if search is None else search.shares(len(planners))
    for (kind, planner), share in zip(planners.items(), shares, strict=True):
        stages[kind] = replace(planner, search=share).plan(next(iter(stages.values()), None))
    peak, budget = _stage_peak(planners, stages), next(iter(planners.values())).bytes_of.budget
    if peak <= budget:
        return stages
    raise BudgetError(f"micro-batches of {len(stages)} kinds need {peak} bytes together", budget, peak)


def _stage_peak(planners: Mapping[Kind, StagePlanner], stages: Mapping[Kind, PlannedStage]) -> int:
    planner = next(iter(planners.values()))
    return largest_peak(planner.schedule.open_forwards(planner.number), list(stages.values()))
