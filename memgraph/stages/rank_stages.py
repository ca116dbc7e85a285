"""The plans of a rank's stages, for each kind of its micro-batches.

stage 0 for 2 rows, and for 1 row; stage 2 for both    ->    plans that fit beside each other
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.rank_bytes import StageBytes

from .planned_stage import PlannedStage, StagePlan
from .rank_planner import RankPlanner
from .stage_planner import StagePlanner
from .stage_search import StageSearch

Kind = tuple[tuple[torch.Size, ...], str]  # of a micro-batch: its shapes, and how it is planned
Planners = Mapping[int, Mapping[Kind, StagePlanner]]  # by the numbers of stages
KindPlans = Mapping[Kind, StagePlan]
Plans = Mapping[int, KindPlans]
ROUNDS = 3  # of the bisection between the smallest plans and all of the room


@dataclass(frozen=True, eq=False)
class RankStages:
    """The stages of the rank with this number."""

    schedule: PipelineSchedule
    number: int
    budget: int
    planners: Planners

    def searched(self, search: StageSearch) -> Plans | None:
        """Return plans within the budget; None if none are found."""
        if len(self.planners) == 1:
            tries: list[tuple[Mapping[int, int], StageSearch | None]] = [(self._rank.equal_parts(), search)]
        else:
            fit, equal = self._rank.fitting(search.until), self._rank.equal_parts()
            # A longer search may find plans that hold more, and do not fit together.
            tries = [(equal, search)] if fit is None else [(fit.budgets, search), (fit.budgets, None)]
        found = (self._within(budgets, each) for budgets, each in tries)
        return next((plans for plans in found if plans is not None and self.peak(plans) <= self.budget), None)

    @cached_property
    def smallest(self) -> Plans:
        """Plans of the quick passes that take few bytes. They follow from no budget and no measured time, so that every
        process finds them, and what they take can be named as a budget."""
        plans: dict[int, dict[Kind, StagePlan]] = {}
        for number, by_kind in self._own.items():
            nominal: dict[Kind, StagePlan] = {}
            for kind, planner in by_kind.items():
                nominal[kind] = planner.nominal.smallest(next(iter(nominal.values()), None))
            plans[number] = {kind: by_kind[kind].as_measured(plan) for kind, plan in nominal.items()}
        return plans

    def above_smallest(self, search: StageSearch) -> Plans:
        """Return plans between the smallest ones, which fit, and those that may take all of the room."""
        best, top, low, high = self.smallest, self._rank.of_room(1.0), 0.0, 1.0
        forwards = self.schedule.open_forwards
        least = {number: _stage_peak(forwards(number), by_kind.values()) for number, by_kind in best.items()}
        for _ in range(ROUNDS if len(self.planners) > 1 else 0):
            if search.is_late:
                break
            share = (low + high) / 2
            budgets = {number: nbytes + int(share * max(0, top[number] - nbytes)) for number, nbytes in least.items()}
            plans = self._within(budgets, None)
            if plans is not None and self.peak(plans) <= self.budget:
                best, low = plans, share
            else:
                high = share
        return best

    def peak(self, plans: Plans) -> int:
        """Return the forecast bytes of the rank."""
        if len(plans) == 1:
            ((number, by_kind),) = plans.items()
            return _stage_peak(self.schedule.open_forwards(number), by_kind.values())
        kinds = ((number, [plan.nbytes for plan in by_kind.values()]) for number, by_kind in plans.items())
        return self._rank.peak({number: StageBytes.largest(every) for number, every in kinds})

    def ready(self, plans: Plans) -> dict[int, dict[Kind, PlannedStage]]:
        """Return the stages with these plans, ready to run."""
        return {
            number: {kind: self.planners[number][kind].ready(plan) for kind, plan in by_kind.items()}
            for number, by_kind in plans.items()
        }

    @cached_property
    def _rank(self) -> RankPlanner:
        usual = {number: next(iter(by_kind.values())) for number, by_kind in self.planners.items()}
        return RankPlanner.of(self.schedule, self.number, self.budget, usual)

    @cached_property
    def _own(self) -> Planners:
        """The planners; the update of several stages counts for all of them at once."""
        if len(self.planners) == 1:
            return self.planners
        return {
            number: {kind: each.without_update for kind, each in by_kind.items()}
            for number, by_kind in self.planners.items()
        }

    def _within(self, budgets: Mapping[int, int], search: StageSearch | None) -> Plans | None:
        """Return plans of stages within budgets of their own; None if there is one without."""
        shares = [None] * len(self._own) if search is None else search.shares(len(self._own))
        plans: dict[int, KindPlans] = {}
        for (number, by_kind), share in zip(self._own.items(), shares, strict=True):
            found = _planned_together({kind: each.within(budgets[number]) for kind, each in by_kind.items()}, share)
            if found is None:
                return None
            plans[number] = found
        return plans


def _planned_together(planners: Mapping[Kind, StagePlanner], search: StageSearch | None) -> KindPlans | None:
    """Return plans of a stage for all kinds, whose forwards may be open at once; None if they don't fit together."""
    plans: dict[Kind, StagePlan] = {}
    shares = [None] * len(planners) if search is None else search.shares(len(planners))
    for (kind, planner), share in zip(planners.items(), shares, strict=True):
        plan = replace(planner, search=share).plan(next(iter(plans.values()), None))
        if plan is None:
            return None
        plans[kind] = plan
    first = next(iter(planners.values()))
    peak = _stage_peak(first.schedule.open_forwards(first.number), plans.values())
    return plans if peak <= first.bytes_of.budget else None


def _stage_peak(forwards: int, plans: Collection[StagePlan]) -> int:
    """Return the bytes of a stage if so many forwards of any of these may be open at once."""
    others = forwards - 1
    alone = max(plan.peak - others * plan.nbytes.open for plan in plans)
    return alone + others * max(plan.nbytes.open for plan in plans)
