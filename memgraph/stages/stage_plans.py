"""The plans of a rank's stage. The first call decides which parameters each rank has, and later calls follow it.

first call: 8 rows in 4 micro-batches    ->    the best cut, and the plan of this rank's stage
later call: 7 rows in 4 micro-batches    ->    the cut between the same parameters, a plan for 2 rows and one for 1
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .arguments import PipelineArguments
from .chunks import batch_nbytes
from .cutter import Cutter
from .first_cut import FirstCut
from .mini_batch_plan import MiniBatchPlan
from .mini_batch_planner import MiniBatchPlanner
from .ranks.stage_group import PLANNING, StageGroup
from .stage_cut import StageCut
from .stage_search import CUT_SHARE, StageSearch
from .state.stage_tensors import all_tensors
from .state.stage_updates import StageUpdates
from .step_capture import StepCapture, of_first_pipeline, random_nbytes


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
