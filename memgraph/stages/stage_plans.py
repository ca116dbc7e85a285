"""The plans of a rank's stage. The first call decides which parameters each rank has, and later calls follow it.

first call: 8 rows in 4 micro-batches    ->    the best cut, and the plan of this rank's stage
later call: 7 rows in 4 micro-batches    ->    the cut between the same parameters, a plan for 2 rows and one for 1

Plan the stages of a rank for one kind of mini-batch, in a cut, together with all ranks.

a cut, 7 rows in 4 micro-batches    ->    plans for 2 rows and for 1 on each rank, or the budgets that do
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from passes.stages.pipeline_schedule import NO_GRADIENTS, PipelineSchedule
from passes.stages.timeline import StageTimes

from ..profile.memory_meter import resident_bytes
from .arguments import PipelineArguments, device_of_model
from .chunks import MicroBatch, batch_nbytes
from .cutter import Cutter
from .first_cut import FirstCut
from .mini_batch_plan import MiniBatchPlan
from .rank_stages import Kind, Plans, RankStages
from .ranks.stage_group import PLANNING, StageGroup, of_all_ranks
from .stage_budget import StageBudget, budgets_error
from .stage_cut import StageCut
from .stage_planner import StagePlanner, checkpoint_kinds
from .stage_search import CUT_SHARE, StageSearch
from .state.stage_tensors import all_tensors
from .state.stage_updates import StageUpdates
from .step_capture import StepCapture, of_first_pipeline, random_nbytes
from .whole_step import WholeStep

CUTS = 4  # that are tried with the smallest plans of their stages


@dataclass(frozen=True, eq=False)
class StagePlans:
    """Plans the stage of this rank for mini-batches, together with all ranks; `begin` is that of the call."""

    module: nn.Module
    group: StageGroup
    given: PipelineArguments
    begin: float

    def first(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], updates: StageUpdates
    ) -> tuple[FirstCut, MiniBatchPlan]:
        """Return the best cut, and the plans for mini-batches like this one.

        If the search ends without plans within the budgets, the cut and the plans are those that an error names.

        Raises:
            BudgetError: no plan fits the budget of some rank; on all ranks.
            CaptureError, ValueError, AgreementError: the stages can't be planned here, or on another rank.
        """
        planner, cutter, search = self._captured(args, kwargs, updates)
        cut = self._best_cut(cutter)
        planned = planner.searched(cut, search) if cut is not None else None
        if cut is None or planned is None:

            def roomier(cut: FirstCut, needed: list[int]) -> FirstCut | None:
                begins = cutter.roomier_cut(cut.cut.begins, needed)
                return None if begins is None else self._first_cut(cutter, begins, cut.given)

            cut, planned = planner.smallest(self._first_cut(cutter, *cutter.nominal_cut()), search, roomier)
        return replace(cut, stages=planner.stages(replace(cut, given=cut.given.smallest))), planned

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], updates: StageUpdates) -> FirstCut:
        """Return the best cut alone, whether such a mini-batch fits or not; raises as `first`, but no BudgetError."""
        _, cutter, _ = self._captured(args, kwargs, updates)
        return self._best_cut(cutter) or self._first_cut(cutter, *cutter.nominal_cut())

    def later(self, args: tuple[Any, ...], kwargs: dict[str, Any], first: FirstCut) -> MiniBatchPlan:
        """Return the plans for mini-batches like this one in the first cut; raises as `first`."""
        known = first.cut.step.loss_output, first.cut.step.machine
        capture = StepCapture(self.module, self.group, self.given, first.updates_nbytes, first.replicas, *known)
        planner = self._planner(capture, args, kwargs)
        search = StageSearch.beginning(self.given.time_limit, self.begin)
        return planner.searched(first, search) or planner.smallest(first, search, None)[1]

    def _captured(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], updates: StageUpdates
    ) -> tuple[MiniBatchPlanner, Cutter, StageSearch]:
        with self.group.together(PLANNING):
            nbytes = self._updates_nbytes(updates)
        capture = StepCapture(self.module, self.group, self.given, nbytes, updates.replicas)
        planner = self._planner(capture, args, kwargs, updates.lines())
        search = StageSearch.beginning(self.given.time_limit, self.begin)
        share = search.of_share(CUT_SHARE)
        return planner, Cutter(self.module, planner.steps[0], self.given, planner.nbytes, updates, share), search

    def _planner(
        self, capture: StepCapture, args: tuple[Any, ...], kwargs: dict[str, Any], lines: Iterable[str] = ()
    ) -> MiniBatchPlanner:
        batches = self.given.divided(args, kwargs)
        examples = {batch.shapes: batch for batch in reversed(batches)}
        shapes = dict.fromkeys(batch.shapes for batch in batches)
        steps = capture.steps([examples[each] for each in shapes], lines)
        nbytes = batch_nbytes(args, kwargs) + random_nbytes(steps)
        return MiniBatchPlanner(self.module, self.group, self.given, batches, steps, nbytes)

    def _updates_nbytes(self, updates: StageUpdates) -> int:
        return sum(updates.nbytes(dict(self.module.named_parameters())))

    def _best_cut(self, cutter: Cutter) -> FirstCut | None:
        """Return the best cut; None, on all ranks, if none is found that keeps the budgets.

        Raises:
            ValueError: there are too few places to cut, or `balance` has others; on all ranks.
        """
        with self.group.together(PLANNING):
            own = json.dumps(_found(cutter)) if self.group.rank == 0 else ""
        shared = self.group.share(own.encode(), "exchange of the cut")[0]
        begins, chosen = json.loads(of_first_pipeline(cutter.updates.replicas, shared))
        return None if chosen is None else self._first_cut(cutter, begins, self.given.choosing(*chosen))

    def _first_cut(self, cutter: Cutter, begins: Sequence[int], given: PipelineArguments) -> FirstCut:
        cut, updates = StageCut(cutter.step, tuple(begins)), cutter.updates
        stages = range(self.group.rank, len(cut.begins), self.group.ranks)
        parameters = {stage: cutter.parameters(cut, stage) for stage in stages}
        owned = cut.owned(all_tensors(self.module))
        return FirstCut(cut, owned, parameters, given, self._updates_nbytes(updates), updates.replicas)


def _found(cutter: Cutter) -> tuple[list[int], tuple[str, int, int] | None]:
    """Return where the stages begin, and the schedule; None if no plans are found."""
    found = cutter.cut()
    if found is None:
        return [], None
    begins, given = found
    return begins, (given.schedule, given.stages_per_rank, given.delay)


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
