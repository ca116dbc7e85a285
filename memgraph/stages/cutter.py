"""The best cut of a step under the budgets of all stages.

step of one micro-batch, budgets    ->    where each stage begins
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from torch import nn

import passes
from passes.stages.cut import Stage, balanced_cut, best_cut

from ..profile.memory_meter import resident_bytes
from .arguments import PipelineArguments, device_of_model
from .planned_stage import StagePlanner
from .stage_budget import StageBudget, StageParameters
from .stage_cut import StageCut
from .stage_group import StageGroup
from .stage_tensors import all_tensors
from .stage_updates import StageUpdates
from .whole_step import WholeStep


@dataclass(frozen=True, eq=False)
class Cutter:
    """Cuts a step for a group; `batch_nbytes` are those of a mini-batch."""

    module: nn.Module
    step: WholeStep
    group: StageGroup
    given: PipelineArguments
    batch_nbytes: int
    updates: StageUpdates

    def begins(self) -> tuple[int, ...] | list[int]:
        """Return the place at which each stage begins; if no cut fits, a list of the smallest budgets.

        Raises:
            ValueError: there are more stages than places to cut, or `balance` has other places.
        """
        orders = map(self.given.order, range(self.group.stages))
        costs, forwards = self.step.costs, [order.open_forwards for order in orders]
        if self.given.balance is not None:
            return StageCut.of(self.step, balanced_cut(costs, self.given.balance, forwards)).begins
        unlimited = best_cut(costs, [math.inf] * self.group.stages, forwards)

        @cache
        def us(stage: Stage) -> float:
            return self._planner(self._around(stage), stage.number).us()

        try:
            cut = best_cut(costs, self.given.budgets, forwards, us)
        except passes.BudgetError:
            if all(map(math.isfinite, map(us, unlimited.stages))):
                return StageCut.of(self.step, unlimited).begins
            return self._smallest(StageCut.of(self.step, unlimited))
        return StageCut.of(self.step, cut).begins

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

    def _planner(self, cut: StageCut, stage: int) -> StagePlanner:
        order = self.given.order(stage)
        parameters = self.parameters(cut, stage)
        sizes = self.batch_nbytes, cut.traces[stage], order, cut.sent_backward(stage), parameters
        budget = StageBudget.of(self.given.budgets[stage], *sizes)
        return StagePlanner(cut, order, budget, device_of_model(self.module))

    def _around(self, stage: Stage) -> StageCut:
        """Return a cut with this stage; where the others begin changes what it sends by nothing but the receivers."""
        borders = list(self.step.costs.borders)
        count, number = self.group.stages, stage.number
        first, last = borders.index(stage.begin), borders.index(stage.end)
        before = [borders[i * first // max(number, 1)] for i in range(number)]
        after = count - number - 1
        rest = [borders[last + i * (len(borders) - 1 - last) // max(after, 1)] for i in range(after)]
        return StageCut(self.step, (*before, stage.begin, *rest))

    def _smallest(self, cut: StageCut) -> list[int]:
        return [self._planner(cut, k).smallest() for k in range(self.group.stages)]
