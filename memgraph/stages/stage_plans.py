"""The plans of a rank's stage. The first call decides which parameters each rank has, and later calls follow it.

first call: 8 rows in 4 micro-batches    ->    the best cut, and the plan of this rank's stage
later call: 7 rows in 4 micro-batches    ->    the cut between the same parameters, a plan for 2 rows and one for 1
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from passes.stages.pipeline_schedule import NO_GRADIENTS, PipelineSchedule
from passes.stages.timeline import StageTimes

from ..errors import AgreementError
from ..oss.comm.rank_group import format_failures
from ..profile.memory_meter import resident_bytes
from .arguments import PipelineArguments, device_of_model
from .chunks import batch_nbytes
from .cutter import Cutter
from .first_cut import FirstCut
from .mini_batch_plan import MiniBatchPlan, StagesByChunk
from .rank_stages import Planners, Stages, rank_stages
from .ranks.stage_group import PLANNING, StageGroup
from .stage_budget import StageBudget, budgets_error
from .stage_cut import StageCut
from .stage_planner import StagePlanner, checkpoint_kinds
from .stage_search import CUT_SHARE, StageSearch
from .state.stage_tensors import all_tensors
from .state.stage_updates import StageUpdates
from .step_capture import StepCapture, of_first_pipeline, random_nbytes
from .whole_step import WholeStep

Forecasts = tuple[tuple[int, ...], tuple[StageTimes, ...]]


@dataclass(frozen=True, eq=False)
class StagePlans:
    """Plans the stage of this rank for mini-batches, together with all ranks."""

    module: nn.Module
    group: StageGroup
    given: PipelineArguments

    def plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], first: FirstCut | None, updates: StageUpdates | None
    ) -> tuple[FirstCut, MiniBatchPlan]:
        """Return the plans for mini-batches like this one, and the first cut.

        Args:
            updates: of the first call, where there is no cut yet.

        Raises:
            BudgetError: no plan fits the budget of some rank; on all ranks.
            CaptureError, ValueError, AgreementError: the stages can't be planned here, or on another rank.
        """
        begin, batches = time.monotonic(), self.given.divided(args, kwargs)
        examples = {batch.shapes: batch for batch in reversed(batches)}
        shapes = list(dict.fromkeys(batch.shapes for batch in batches))
        capture = self._capture(first, updates)
        steps = capture.steps([examples[each] for each in shapes], updates.lines() if updates else ())
        nbytes = batch_nbytes(args, kwargs) + random_nbytes(steps)
        search = StageSearch.beginning(self.given.time_limit, begin)
        if first is None:
            assert updates is not None
            first = self._first(steps[0], nbytes, updates, search.of_share(CUT_SHARE))
        with self.group.reporting(PLANNING):
            cuts = dict(zip(shapes, [first.follow(step) for step in steps], strict=True))
        schedule, usual, last = self._schedule(len(batches), first), *checkpoint_kinds(self.given.checkpoint)
        kinds = [(batch.shapes, usual if batch is not batches[-1] else last) for batch in batches]
        planners = {
            stage: {kind: self._planner(cuts[kind[0]], first, stage, nbytes, kind[1]) for kind in dict.fromkeys(kinds)}
            for stage in schedule.stages_of(self.group.rank)
        }
        planned, peak = self._planned(schedule, planners, search)
        stages = {stage: [by_kind[kind] for kind in kinds] for stage, by_kind in planned.items()}
        trained = {name for cut in cuts.values() for name in cut.owners}
        owners = {name: owning for name, owning in first.cut.owners.items() if name in trained}
        return first, MiniBatchPlan(schedule, stages, owners, peak, *self._of_all(stages, peak))

    def _schedule(self, chunks: int, first: FirstCut) -> PipelineSchedule:
        given = first.given
        return (given if torch.is_grad_enabled() else replace(given, schedule=NO_GRADIENTS)).order(chunks)

    def _of_all(self, stages: StagesByChunk, peak: int) -> Forecasts:
        """Return the peaks of all ranks, and the times of all stages."""
        times = [(stage, each[0].plan.times) for stage, each in stages.items()]
        texts = self.group.share(json.dumps([peak, times]).encode(), "exchange of forecasts")
        every = [json.loads(text) for text in texts]
        of_stages = sorted(pair for _, pairs in every for pair in pairs)
        return tuple(peak for peak, _ in every), tuple(StageTimes(*each) for _, each in of_stages)

    def _capture(self, first: FirstCut | None, updates: StageUpdates | None) -> StepCapture:
        if first is not None:
            known = first.cut.step.loss_output, first.cut.step.machine
            return StepCapture(self.module, self.group, self.given, first.updates_nbytes, first.replicas, *known)
        with self.group.reporting(PLANNING):
            nbytes, replicas = self._updates_nbytes(updates), updates.replicas if updates else None
        return StepCapture(self.module, self.group, self.given, nbytes, replicas)

    def _updates_nbytes(self, updates: StageUpdates | None) -> int:
        return sum(updates.nbytes(dict(self.module.named_parameters()))) if updates is not None else 0

    def _first(self, step: WholeStep, nbytes: int, updates: StageUpdates, search: StageSearch) -> FirstCut:
        """Return the best cut.

        Raises:
            BudgetError: no cut keeps the budgets; on all ranks.
            ValueError: there are too few places to cut, or `balance` has others; on all ranks.
        """
        cutter = Cutter(self.module, step, self.given, nbytes, updates, search)
        with self.group.reporting(PLANNING):
            own = json.dumps(_found(cutter)) if self.group.rank == 0 else ""
        self.group.check_agreement([f"{PLANNING}: none failed"])
        shared = self.group.share(own.encode(), "exchange of the cut")[0]
        numbers, chosen, refused = json.loads(of_first_pipeline(updates.replicas, shared))
        if refused is not None:
            raise ValueError(refused)
        if chosen is None:
            raise budgets_error(self.given.budgets, numbers, self.given.candidates[0][-1].stages)
        cut, given = StageCut(step, tuple(numbers)), self.given.choosing(*chosen)
        stages = range(self.group.rank, len(cut.begins), self.group.ranks)
        parameters = {stage: cutter.parameters(cut, stage) for stage in stages}
        owned = cut.owned(all_tensors(self.module))
        return FirstCut(cut, owned, parameters, given, self._updates_nbytes(updates), updates.replicas)

    def _planner(self, cut: StageCut, first: FirstCut, stage: int, nbytes: int, checkpoint: str) -> StagePlanner:
        schedule = self._schedule(self.given.chunks, first)
        trace, known = cut.traces[stage], all_tensors(self.module)
        unread = first.owned[stage] - cut.tensors(stage)
        unchanged = set(first.cut.gradient_names(first.cut.traces[stage])) - set(cut.gradient_names(trace))
        kept = [known[name] for name in unread]
        gradients = [known[name] for name in unchanged]
        parameters = replace(first.parameters[stage], unread=resident_bytes(kept) + resident_bytes(gradients))
        sizes = nbytes, trace, schedule, stage, cut.sent_backward(stage), parameters
        budget = StageBudget.of(first.given.stage_budgets()[stage], *sizes)
        return StagePlanner(
            cut, stage, schedule, budget, device_of_model(self.module), checkpoint, self.given.spill_dir
        )

    def _planned(self, schedule: PipelineSchedule, planners: Planners, search: StageSearch) -> tuple[Stages, int]:
        """Return the stages of this rank and its forecast bytes, once all ranks have theirs.

        Raises:
            BudgetError: the stages of some rank do not fit; on all ranks.
            AgreementError: another rank can't plan its stage.
        """
        stages: Stages = {}
        failure, raised = "", None
        try:
            budget = self.given.budgets[self.group.rank]
            stages, needed = rank_stages(schedule, self.group.rank, budget, planners, search)
        except Exception as error:
            failure, raised = f"{type(error).__name__}: {error}", error
            needed = getattr(error, "smallest", 0)
        own = json.dumps([failure, needed]).encode()
        each = [json.loads(text) for text in self.group.share(own, "exchange of plans")]
        failures = {rank: text for rank, (text, _) in enumerate(each) if text}
        if not failures:
            return stages, needed
        if all(text.startswith("BudgetError") for text in failures.values()):
            raise budgets_error(self.given.budgets, [nbytes for _, nbytes in each], schedule.stages)
        raise raised or AgreementError(f"stages can't be planned: {format_failures(failures)}")


def _found(cutter: Cutter) -> tuple[list[int], tuple[str, int, int] | None, str | None]:
    """Return where the stages begin, or the smallest budgets; the schedule, or None; why no rank can cut the step."""
    try:
        numbers, given = cutter.cut()
    except ValueError as error:
        return [], None, str(error)
    return numbers, None if given is None else (given.schedule, given.stages_per_rank, given.delay), None
