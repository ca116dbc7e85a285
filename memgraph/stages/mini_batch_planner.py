"""Plan the stages of a rank for one kind of mini-batch, in a cut, together with all ranks.

a cut, 7 rows in 4 micro-batches    ->    plans for 2 rows and for 1 on each rank, or the budgets that do
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from passes.stages.pipeline_schedule import NO_GRADIENTS, PipelineSchedule
from passes.stages.timeline import StageTimes

from ..profile.memory_meter import resident_bytes
from .arguments import PipelineArguments, device_of_model
from .chunks import MicroBatch
from .first_cut import FirstCut
from .mini_batch_plan import MiniBatchPlan
from .rank_stages import Kind, Plans, RankStages
from .ranks.stage_group import PLANNING, StageGroup, of_all_ranks
from .stage_budget import StageBudget, budgets_error
from .stage_cut import StageCut
from .stage_planner import StagePlanner, checkpoint_kinds
from .stage_search import StageSearch
from .state.stage_tensors import all_tensors
from .whole_step import WholeStep

CUTS = 4  # that are tried with the smallest plans of their stages


@dataclass(frozen=True, eq=False)
class MiniBatchPlanner:
    """Plans the stages of this rank for a mini-batch.

    Attributes:
        batches: its micro-batches.
        steps: captured for those of each shape.
        nbytes: of the mini-batch.
    """

    module: nn.Module
    group: StageGroup
    given: PipelineArguments
    batches: Sequence[MicroBatch]
    steps: Sequence[WholeStep]
    nbytes: int

    def searched(self, first: FirstCut, search: StageSearch) -> MiniBatchPlan | None:
        """Return plans within the budgets; None, on all ranks, if some rank finds none.

        Raises:
            ValueError: the parameters lie so that the step can't be cut; on all ranks.
        """
        with self.group.together(PLANNING):
            stages = self.stages(first)
            plans = stages.searched(search)
        found = self.group.share(json.dumps(plans is not None).encode(), "exchange of plans")
        return self._plan(first, stages, plans) if plans is not None and all(map(json.loads, found)) else None

    def smallest(
        self, first: FirstCut, search: StageSearch, roomier: Callable[[FirstCut, list[int]], FirstCut | None] | None
    ) -> tuple[FirstCut, MiniBatchPlan]:
        """Return plans that a search did not find, if those for the smallest budgets fit, and their cut.

        Args:
            roomier: returns another cut, for what the ranks need in one; None if another call has chosen the cut: then
                its plans count in the budgets that an error names.

        Raises:
            BudgetError: they don't; on all ranks. A new process finds them within the budgets that it names.
        """
        budgets, needs, cut = self.given.budgets, dict[tuple[int, ...], list[Any]](), first
        while cut.cut.begins not in needs:
            tight = replace(cut, given=cut.given.smallest)
            with self.group.together(PLANNING):
                stages = self.stages(tight)
                needed = stages.peak(stages.smallest)
                before = cut.stages.peak(cut.stages.smallest) if cut.stages is not None else 0
            own = json.dumps([needed, before, search.is_late and not search.is_bounded])
            texts = self.group.share(own.encode(), "exchange of the smallest budgets")
            every = needs[cut.cut.begins] = [json.loads(text) for text in texts]
            if all(now <= budget for (now, _, _), budget in zip(every, budgets, strict=True)):
                found = None if roomier is None else stages.searched(search)
                return cut, self._plan(tight, stages, found or stages.above_smallest(search))
            other = roomier(cut, [now for now, _, _ in every]) if roomier is not None and len(needs) < CUTS else None
            cut = cut if other is None else other
        every = needs[first.cut.begins]
        if (
            any(goes_on for _, _, goes_on in every)
            and (planned := self.searched(replace(first, given=first.given.smallest), search.longer)) is not None
        ):
            return first, planned
        begins = first.cut.begins
        if roomier is None:
            named = [max(budget, now, before) for budget, (now, before, _) in zip(budgets, every, strict=True)]
            raise of_all_ranks(budgets_error(budgets, named, len(begins), begins))
        raise of_all_ranks(budgets_error(budgets, [now for now, _, _ in every], len(begins)))

    def stages(self, first: FirstCut) -> RankStages:
        """Return the stages of this rank in a cut, which are not planned yet."""
        shapes = list(dict.fromkeys(batch.shapes for batch in self.batches))
        cuts = dict(zip(shapes, [first.follow(step) for step in self.steps], strict=True))
        schedule = self._schedule(first, len(self.batches))
        planners = {
            stage: {kind: self._planner(cuts[kind[0]], first, stage, kind[1]) for kind in dict.fromkeys(self._kinds)}
            for stage in schedule.stages_of(self.group.rank)
        }
        return RankStages(schedule, self.group.rank, self.given.budgets[self.group.rank], planners)

    @cached_property
    def _kinds(self) -> list[Kind]:
        """The kind of each micro-batch: its shapes, and how it is planned."""
        usual, last = checkpoint_kinds(self.given.checkpoint)
        return [(batch.shapes, usual if batch is not self.batches[-1] else last) for batch in self.batches]

    def _plan(self, first: FirstCut, stages: RankStages, plans: Plans) -> MiniBatchPlan:
        """Return the plan of this rank, with the forecasts of all."""
        by_chunk = {stage: [by_kind[kind] for kind in self._kinds] for stage, by_kind in stages.ready(plans).items()}
        trained = {name for each in by_chunk.values() for stage in each for name in stage.cut.owners}
        owners = {name: owning for name, owning in first.cut.owners.items() if name in trained}
        peak = stages.peak(plans)
        own = json.dumps([peak, [(stage, each[0].plan.times) for stage, each in by_chunk.items()]])
        every = [json.loads(text) for text in self.group.share(own.encode(), "exchange of forecasts")]
        times = sorted(pair for _, pairs in every for pair in pairs)
        forecasts = tuple(nbytes for nbytes, _ in every), tuple(StageTimes(*each) for _, each in times)
        return MiniBatchPlan(stages.schedule, by_chunk, owners, peak, *forecasts)

    def _schedule(self, first: FirstCut, chunks: int) -> PipelineSchedule:
        given = first.given
        return (given if torch.is_grad_enabled() else replace(given, schedule=NO_GRADIENTS)).order(chunks)

    def _planner(self, cut: StageCut, first: FirstCut, stage: int, checkpoint: str) -> StagePlanner:
        schedule = self._schedule(first, self.given.chunks)
        trace, known = cut.traces[stage], all_tensors(self.module)
        unread = first.owned[stage] - cut.tensors(stage)
        unchanged = set(first.cut.gradient_names(first.cut.traces[stage])) - set(cut.gradient_names(trace))
        kept = [known[name] for name in unread]
        gradients = [known[name] for name in unchanged]
        parameters = replace(first.parameters[stage], unread=resident_bytes(kept) + resident_bytes(gradients))
        sizes = self.nbytes, trace, schedule, stage, cut.sent_backward(stage), parameters
        budget = StageBudget.of(first.given.stage_budgets()[stage], *sizes)
        return StagePlanner(
            cut, stage, schedule, budget, device_of_model(self.module), checkpoint, self.given.spill_dir
        )
