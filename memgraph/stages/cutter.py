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
from passes.stages.cut import Stage, balanced_cut, best_cut
from passes.stages.pipeline_schedule import PipelineSchedule

from ..profile.memory_meter import resident_bytes
from .arguments import PipelineArguments, device_of_model
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

    def cut(self) -> tuple[list[int], PipelineArguments | None]:
        """Return the place at which each stage begins, and the schedule; or the smallest budgets, and None.

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

    def _first_fit(self, chain: Sequence[PipelineArguments]) -> tuple[Cutter, list[int]] | None:
        for given in chain:
            cutter = replace(self, given=given)
            if (begins := cutter._begins()) is not None:
                return cutter, begins
        return None

    def _begins(self) -> list[int] | None:
        """Return the place at which each stage begins; None if no cut keeps the budgets."""
        costs, budgets = self.step.costs, self.given.stage_budgets
        if self.given.balance is not None:
            return list(self._unlimited.begins) if math.isfinite(self._us(self._unlimited.begins)) else None

        @cache
        def us(stage: Stage) -> float:
            return self._planner(self._around(stage), stage.number).times().busy

        with suppress(passes.BudgetError):
            cut = best_cut(costs, budgets, self._forwards, us, self.step.copy_us, self.search.until)
            return [stage.begin for stage in cut.stages]
        return list(self._unlimited.begins) if math.isfinite(self._us(self._unlimited.begins)) else None

    def _searched(self) -> tuple[list[int], PipelineArguments | None]:
        """Return the best cut without budgets, if each of its stages has a plan that takes a search to find."""
        cut, search = self._unlimited, replace(self.search, is_bounded=True)
        planners = (self._planner(cut, stage) for stage in range(len(cut.begins)))
        shares = search.shares(len(cut.begins))
        if not search.is_late and all(
            math.isfinite(replace(planner, search=share).times().forward)
            for planner, share in zip(planners, shares, strict=True)
        ):
            return list(cut.begins), self.given
        return self._smallest(), None

    def _us(self, begins: Sequence[int]) -> float:
        """Return the forecast time of a mini-batch; infinite if a stage has no plan."""
        cut = StageCut(self.step, tuple(begins))
        times = [self._planner(cut, stage).times() for stage in range(len(begins))]
        return self._schedule.timeline(times).us if all(math.isfinite(each.forward) for each in times) else math.inf

    @cached_property
    def _unlimited(self) -> StageCut:
        """The cut that is wanted, or the best one without budgets."""
        costs, count = self.step.costs, len(self.given.stage_budgets)
        if self.given.balance is not None:
            return StageCut.of(self.step, balanced_cut(costs, self.given.balance, self._forwards))
        return StageCut.of(self.step, best_cut(costs, [math.inf] * count, self._forwards))

    @property
    def _forwards(self) -> list[int]:
        return [self._schedule.open_forwards(stage) for stage in range(len(self.given.stage_budgets))]

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

    def _planner(self, cut: StageCut, stage: int) -> StagePlanner:
        sizes = self.batch_nbytes, cut.traces[stage], self._schedule, stage, cut.sent_backward(stage)
        budget = StageBudget.of(self.given.stage_budgets[stage], *sizes, self.parameters(cut, stage))
        device, kind = device_of_model(self.module), checkpoint_kinds(self.given.checkpoint)[0]
        return StagePlanner(cut, stage, self._schedule, budget, device, kind, self.given.spill_dir)

    def _around(self, stage: Stage) -> StageCut:
        """Return a cut with this stage; where the others begin changes what it sends by nothing but the receivers."""
        borders = list(self.step.costs.borders)
        count, number = len(self.given.stage_budgets), stage.number
        first, last = borders.index(stage.begin), borders.index(stage.end)
        before = [borders[i * first // max(number, 1)] for i in range(number)]
        after = count - number - 1
        rest = [borders[last + i * (len(borders) - 1 - last) // max(after, 1)] for i in range(after)]
        return StageCut(self.step, (*before, stage.begin, *rest))

    def _smallest(self) -> list[int]:
        cut = self._unlimited
        return [self._planner(cut, k).smallest() for k in range(len(self.given.stage_budgets))]
