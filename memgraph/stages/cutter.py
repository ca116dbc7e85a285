"""The best cut of a step under the budgets of all stages.

step of one micro-batch, budgets    ->    where each stage begins
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property

from torch import nn

import passes
from passes.stages.cut import Stage, balanced_cut, best_cut, roomier_cut
from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.timeline import StageTimes

from ..profile.memory_meter import resident_bytes
from .arguments import PipelineArguments, device_of_model
from .rank_planner import RankPlanner, room_shares
from .stage_budget import StageBudget, StageParameters
from .stage_cut import StageCut
from .stage_planner import StagePlanner, checkpoint_kinds
from .stage_search import StageSearch
from .state.stage_tensors import all_tensors
from .state.stage_updates import StageUpdates
from .whole_step import WholeStep


@dataclass(frozen=True, eq=False)
class Cutter:
    """Cuts a step; `batch_nbytes` are those of a mini-batch."""

    module: nn.Module
    step: WholeStep
    given: PipelineArguments
    batch_nbytes: int
    updates: StageUpdates
    search: StageSearch

    def cut(self) -> tuple[list[int], PipelineArguments] | None:
        """Return the place at which each stage begins, and the schedule; None if no plans are found.

        Raises:
            ValueError: there are more stages than places to cut, or `balance` has other places.
        """
        candidates = self.given.candidates
        shares = self.search.shares(len(candidates))
        tried = (replace(self, search=share)._first_fit(chain) for share, chain in zip(shares, candidates, strict=True))
        fitting = [found for found in tried if found is not None]
        if not fitting:
            return replace(self, given=candidates[0][-1])._searched()
        cutter, begins = fitting[0] if len(candidates) == 1 else min(fitting, key=lambda each: each[0]._us(each[1]))
        return begins, cutter.given

    def nominal_cut(self) -> tuple[list[int], PipelineArguments]:
        """Return the best cut without budgets for nominal prices, the same on all ranks and in each process."""
        cutter = replace(self, given=self.given.candidates[0][-1], step=self.step.nominal)
        return list(cutter._unlimited.begins), cutter.given

    def roomier_cut(self, begins: Sequence[int], needed: Sequence[int]) -> list[int] | None:
        """Return another cut for nominal prices, for ranks that need so many bytes in that one; None if there is none.

        Raises nothing, and gives the same on all ranks.
        """
        cutter = replace(self, given=self.given.candidates[0][-1], step=self.step.nominal)
        if self.given.balance is not None:
            return None
        parts = cutter.given.stages_per_rank
        of_stages = [nbytes / parts for nbytes in needed] * parts
        budgets = cutter.given.stage_budgets(1 / parts)
        cut = roomier_cut(cutter.step.costs, budgets, cutter._forwards, begins, of_stages)
        return None if cut is None else [stage.begin for stage in cut.stages]

    def _first_fit(self, chain: Sequence[PipelineArguments]) -> tuple[Cutter, list[int]] | None:
        for given in chain:
            cutter = replace(self, given=given)
            if (begins := cutter._begins()) is not None:
                return cutter, begins
        return None

    def _begins(self) -> list[int] | None:
        """Return the place at which each stage begins; None if no cut keeps the budgets."""
        if self.given.balance is None:
            for share in room_shares(self.given.stages_per_rank, self.search.until):
                begins = self._best(share)
                if begins is None:  # so there is none with smaller stages
                    break
                if self.given.stages_per_rank == 1 or math.isfinite(self._us(begins)):
                    return begins
        is_wanted = self.given.balance is not None or not self.search.is_late
        return list(self._unlimited.begins) if is_wanted and math.isfinite(self._us(self._unlimited.begins)) else None

    def _best(self, share: float) -> list[int] | None:
        """Return the best cut into stages that take at most a share of the budget of their ranks; None without one."""

        @cache
        def us(stage: Stage) -> float:
            planner = self._planner(self._around(stage), stage.number)
            return planner.within(budgets[stage.number]).times().busy

        budgets = self.given.stage_budgets(share)
        with suppress(passes.BudgetError):
            cut = best_cut(self.step.costs, budgets, self._forwards, us, self.step.copy_us, self.search.until)
            return [stage.begin for stage in cut.stages]
        return None

    def _searched(self) -> tuple[list[int], PipelineArguments] | None:
        """Return the best cut without budgets, if each of its stages has a plan that takes a search to find."""
        cut, search = self._unlimited, self.search
        ranks = [self._rank(cut, rank) for rank in range(len(self.given.budgets))]
        shares = search.shares(len(ranks))
        if not search.is_late and all(rank.has_plans(share) for rank, share in zip(ranks, shares, strict=True)):
            return list(cut.begins), self.given
        return None

    def _us(self, begins: Sequence[int]) -> float:
        """Return the forecast time of a mini-batch; infinite if a rank has no plans, and that without plans once it is
        late."""
        cut, times = StageCut(self.step, tuple(begins)), dict[int, StageTimes]()
        for rank in range(len(self.given.budgets)):
            planner = self._rank(cut, rank)
            if self.search.is_late:
                times.update((stage, each.plain.times) for stage, each in planner.planners.items())
                continue
            found = planner.fitting(self.search.until)
            if found is None:
                return math.inf
            times.update((stage, plan.times) for stage, plan in found.plans.items())
        return self._schedule.timeline([times[stage] for stage in sorted(times)]).us

    @cached_property
    def _unlimited(self) -> StageCut:
        """The cut that is wanted, or the best one without budgets."""
        costs, count = self.step.costs, self.given.stages
        if self.given.balance is not None:
            return StageCut.of(self.step, balanced_cut(costs, self.given.balance, self._forwards))
        return StageCut.of(self.step, best_cut(costs, [math.inf] * count, self._forwards))

    @property
    def _forwards(self) -> list[int]:
        return [self._schedule.open_forwards(stage) for stage in range(self.given.stages)]

    def parameters(self, cut: StageCut, stage: int) -> StageParameters:
        """Return the bytes that follow from the parameters of a stage, and of its optimizer."""
        known = all_tensors(self.module)
        trained = frozenset(cut.gradient_names(cut.traces[stage]))
        unread = cut.owned(known)[stage] - cut.tensors(stage)

        def nbytes(names: Iterable[str]) -> int:
            return resident_bytes([known[name] for name in names])

        return StageParameters(
            nbytes(trained), nbytes(cut.shared(stage)), nbytes(unread), *self.updates.nbytes(trained)
        )

    @property
    def _schedule(self) -> PipelineSchedule:
        return self.given.order(self.given.chunks)

    def _rank(self, cut: StageCut, rank: int) -> RankPlanner:
        planners = {stage: self._planner(cut, stage) for stage in self._schedule.stages_of(rank)}
        return RankPlanner.of(self._schedule, rank, self.given.budgets[rank], planners)

    def _planner(self, cut: StageCut, stage: int) -> StagePlanner:
        sizes = self.batch_nbytes, cut.traces[stage], self._schedule, stage, cut.sent_backward(stage)
        budget = StageBudget.of(self.given.stage_budgets()[stage], *sizes, self.parameters(cut, stage))
        device, kind = device_of_model(self.module), checkpoint_kinds(self.given.checkpoint)[0]
        return StagePlanner(cut, stage, self._schedule, budget, device, kind, self.given.spill_dir)

    def _around(self, stage: Stage) -> StageCut:
        """Return a cut with this stage; where the others begin changes what it sends by nothing but the receivers."""
        borders = list(self.step.costs.borders)
        count, number = self.given.stages, stage.number
        first, last = borders.index(stage.begin), borders.index(stage.end)
        before = [borders[i * first // max(number, 1)] for i in range(number)]
        after = count - number - 1
        rest = [borders[last + i * (len(borders) - 1 - last) // max(after, 1)] for i in range(after)]
        return StageCut(self.step, (*before, stage.begin, *rest))
