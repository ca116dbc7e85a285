"""The plans of a rank's stage. The first call decides which parameters each rank has, and later calls follow it.

first call: 8 rows in 4 micro-batches    ->    the best cut, and the plan of this rank's stage
later call: 7 rows in 4 micro-batches    ->    the cut between the same parameters, a plan for 2 rows and one for 1
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from passes.stages.owned_cut import begins_by_owners

from ..errors import AgreementError, BudgetError
from ..oss.comm.rank_group import format_failures
from ..profile.memory_meter import resident_bytes
from .action_order import NO_GRADIENTS
from .arguments import PipelineArguments, device_of_model
from .chunks import MicroBatch, batch_nbytes, chunked
from .cutter import Cutter
from .mini_batch_plan import MiniBatchPlan, largest_peak
from .planned_stage import PlannedStage, StagePlanner
from .stage_budget import StageBudget, StageParameters, budgets_error
from .stage_cut import StageCut
from .stage_group import StageGroup
from .stage_tensors import all_tensors
from .stage_updates import StageUpdates
from .whole_step import WholeStep, whole_step

PLANNING = "the planning of the stages"


@dataclass(frozen=True, eq=False)
class FirstCut:
    """The cut of the first call.

    Attributes:
        owned: names of the parameters and buffers of each stage.
        parameters: bytes that follow from those of this rank.
    """

    cut: StageCut
    owned: tuple[frozenset[str], ...]
    parameters: StageParameters

    def follow(self, step: WholeStep) -> StageCut:
        """Return the cut of another step between the same parameters.

        Raises:
            ValueError: its ops need them in another order, or others get gradients.
        """
        if step is self.cut.step:
            return self.cut
        owners = {
            value: [stage for stage, names in enumerate(self.owned) if name in names]
            for value, name in step.tensors.items()
        }
        ops = [self.cut.step.trace.ops[begin] for begin in self.cut.begins]
        cut = StageCut(step, begins_by_owners(step.costs.places, owners, len(self.owned), ops))
        if new := sorted(set(cut.owners) - set(self.cut.owners)):
            raise ValueError(f"{new[0]} got no gradient in the first call, so no stage trains it; make a new pipeline")
        return cut


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
        batches = chunked(args, kwargs, self.given.chunks)
        kinds = {batch.shapes: batch for batch in reversed(batches)}
        shapes = list(dict.fromkeys(batch.shapes for batch in batches))
        steps = self._steps([kinds[each] for each in shapes], first, updates)
        nbytes = batch_nbytes(args, kwargs)
        if first is None:
            assert updates is not None
            first = self._first(steps[0], nbytes, updates)
        with self.group.reporting(PLANNING):
            cuts = [first.follow(step) for step in steps]
        order = replace(self._given, chunks=len(batches)).order(self.group.rank)
        stages = dict(zip(shapes, self._planned([self._planner(cut, first, nbytes) for cut in cuts]), strict=True))
        trained = {name for cut in cuts for name in cut.owners}
        owners = {name: owning for name, owning in first.cut.owners.items() if name in trained}
        peak = largest_peak(order, tuple(stages.values()))
        return first, MiniBatchPlan(order, tuple(stages[batch.shapes] for batch in batches), owners, peak)

    @property
    def _given(self) -> PipelineArguments:
        return self.given if torch.is_grad_enabled() else replace(self.given, schedule=NO_GRADIENTS)

    def _steps(
        self, batches: Sequence[MicroBatch], first: FirstCut | None, updates: StageUpdates | None
    ) -> list[WholeStep]:
        """Capture the step of each micro-batch; ranks have the same ones, with the times of the first rank."""
        loss = None if first is None else first.cut.step.loss_output
        with self.group.reporting(PLANNING):
            steps = [whole_step(self.module, batch.args, batch.kwargs, loss) for batch in batches]
            lines = [*(line for step in steps for line in step.ops), *(updates.lines() if updates else ())]
        self.group.check_agreement([f"{PLANNING}: none failed", *lines])
        own = json.dumps([[op.us for op in step.trace.ops] for step in steps]).encode()
        times = json.loads(self.group.share(own, "exchange of times")[0])
        return [step.with_times(us) for step, us in zip(steps, times, strict=True)]

    def _first(self, step: WholeStep, nbytes: int, updates: StageUpdates) -> FirstCut:
        """Return the best cut.

        Raises:
            BudgetError: no cut keeps the budgets; on all ranks.
        """
        cutter = Cutter(self.module, step, self.group, self.given, nbytes, updates)
        with self.group.reporting(PLANNING):
            found = cutter.begins() if self.group.rank == 0 else ()
        self.group.check_agreement([f"{PLANNING}: none failed"])
        own = json.dumps([isinstance(found, tuple), found]).encode()
        fits, numbers = json.loads(self.group.share(own, "exchange of the cut")[0])
        if not fits:
            raise budgets_error(self.given.budgets, numbers)
        cut = StageCut(step, tuple(numbers))
        return FirstCut(cut, cut.owned(all_tensors(self.module)), cutter.parameters(cut, self.group.rank))

    def _planner(self, cut: StageCut, first: FirstCut, nbytes: int) -> StagePlanner:
        rank, order = self.group.rank, self._given.order(self.group.rank)
        trace, known = cut.traces[rank], all_tensors(self.module)
        unread = first.owned[rank] - cut.tensors(rank)
        unchanged = set(first.cut.gradient_names(first.cut.traces[rank])) - set(cut.gradient_names(trace))
        kept = [known[name] for name in unread]
        gradients = [known[name] for name in unchanged]
        parameters = replace(first.parameters, unread=resident_bytes(kept) + resident_bytes(gradients))
        budget = StageBudget.of(self.given.budgets[rank], nbytes, trace, order, cut.sent_backward(rank), parameters)
        return StagePlanner(cut, order, budget, device_of_model(self.module))

    def _planned(self, planners: Sequence[StagePlanner]) -> list[PlannedStage]:
        """Return the stages of this rank, once all ranks have theirs.

        Raises:
            BudgetError: the stage of some rank does not fit; on all ranks.
            AgreementError: another rank can't plan its stage.
        """
        stages: list[PlannedStage] = []
        failure, smallest, raised = "", 0, None
        try:
            stages = _planned_together(planners)
            smallest = largest_peak(planners[0].order, tuple(stages))
        except Exception as error:
            failure, raised = f"{type(error).__name__}: {error}", error
            smallest = getattr(error, "smallest", 0)
        own = json.dumps([failure, smallest]).encode()
        each = [json.loads(text) for text in self.group.share(own, "exchange of plans")]
        failures = {rank: text for rank, (text, _) in enumerate(each) if text}
        if stages and not failures:
            return stages
        if all(text.startswith("BudgetError") for text in failures.values()):
            raise budgets_error(self.given.budgets, [nbytes for _, nbytes in each])
        raise raised or AgreementError(f"stages can't be planned: {format_failures(failures)}")


def _planned_together(planners: Sequence[StagePlanner]) -> list[PlannedStage]:
    """Return stages whose forwards may be open at once.

    Raises:
        BudgetError: they don't fit together.
    """
    stages = [planners[0].plan()]
    stages += [planner.plan(stages[0]) for planner in planners[1:]]
    peak, budget = largest_peak(planners[0].order, tuple(stages)), planners[0].bytes_of.budget
    if peak > budget:
        raise BudgetError(f"micro-batches of {len(stages)} sizes need {peak} bytes together", budget, peak)
    return stages
