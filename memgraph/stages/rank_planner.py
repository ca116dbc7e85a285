"""Plan the stages of a rank together, within its budget: one of them runs at a time.

budget 100, stage 0 keeps 20 and stage 2 keeps 10    ->    70 are left. Each may take all of it while it runs, or less
                                                           where its open forwards lie there while the other one runs
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.rank_bytes import StageBytes, rank_peak

from .planned_stage import StagePlan
from .stage_planner import StagePlanner
from .stage_search import StageSearch

STEPS = 4  # from all of the room for each stage to an equal part of it


class RankPlans(NamedTuple):
    """Plans that fit together, and the budget under which each was found, by the numbers of the stages."""

    plans: Mapping[int, StagePlan]
    budgets: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class RankPlanner:
    """Plans the stages of the rank.

    Attributes:
        budget: of the rank.
        planners: of each of its stages.
        update: bytes of the rank while its optimizer updates.
    """

    schedule: PipelineSchedule
    rank: int
    budget: int
    planners: Mapping[int, StagePlanner]
    update: int

    @classmethod
    def of(
        cls, schedule: PipelineSchedule, rank: int, budget: int, planners: Mapping[int, StagePlanner]
    ) -> RankPlanner:
        """Return the planner of a rank; all of its stages are updated at once."""
        update = sum(planner.bytes_of.update for planner in planners.values())
        if len(planners) > 1:
            planners = {number: planner.without_update for number, planner in planners.items()}
        return cls(schedule, rank, budget, planners, update)

    def fitting(self, until: float = math.inf) -> RankPlans | None:
        """Return plans of the quick passes that fit together; None if none are found.

        Args:
            until: when shares of the room are left out, as `time.monotonic` has it.
        """
        for share in room_shares(len(self.planners), until):
            budgets = self.of_room(share)
            plans = self._within(budgets)
            if plans is None:  # so none is found within less
                return None
            if self.peak({number: plan.nbytes for number, plan in plans.items()}) <= self.budget:
                return RankPlans(plans, budgets)
        return None

    def has_plans(self, search: StageSearch) -> bool:
        """Return True if a search finds a plan of each stage in its part of the room."""
        budgets, shares = self.equal_parts(), search.shares(len(self.planners))
        return all(
            replace(planner, search=share).within(budgets[number]).plan() is not None
            for (number, planner), share in zip(self.planners.items(), shares, strict=True)
        )

    def peak(self, stages: Mapping[int, StageBytes]) -> int:
        """Return the forecast bytes of the rank."""
        return max(rank_peak(self.schedule.moments(self.rank), stages), self.update)

    def equal_parts(self) -> dict[int, int]:
        """Return budgets of the stages that fit together whatever the plans are."""
        return self.of_room(1 / len(self.planners))

    def of_room(self, share: float) -> dict[int, int]:
        """Return budgets with which each stage takes at most this share of what the stages do not keep."""
        if len(self.planners) == 1:
            return dict.fromkeys(self.planners, self.budget)
        room = self.budget - sum(self._kept.values())
        return {number: kept + int(share * room) for number, kept in self._kept.items()}

    def _within(self, budgets: Mapping[int, int]) -> dict[int, StagePlan] | None:
        plans: dict[int, StagePlan] = {}
        for number, planner in self.planners.items():
            plan = planner.within(budgets[number]).plan()
            if plan is None:
                return None
            plans[number] = plan
        return plans

    @cached_property
    def _kept(self) -> dict[int, int]:
        """The bytes that each stage keeps between its runs, whatever its plan is."""
        return {number: planner.plain.nbytes.kept for number, planner in self.planners.items()}


def room_shares(stages: int, until: float = math.inf) -> Iterator[float]:
    """Yield the shares of a rank's room that each of its stages may take, in the order in which they are tried.

    Args:
        until: when those between the first and the last are left out: plans within the last one fit together.
    """
    shares = [stages ** (-i / STEPS) for i in range(STEPS + 1)] if stages > 1 else [1.0]
    for i, share in enumerate(shares):
        if i in (0, len(shares) - 1) or time.monotonic() < until:
            yield share
