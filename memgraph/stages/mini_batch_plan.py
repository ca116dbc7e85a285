"""The stages of a rank for the micro-batches of one mini-batch.

7 rows in 4 micro-batches    ->    the stage for 2 rows, three times, and the stage for 1 row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.timeline import StageTimes

from ..guards.assumptions import Assumptions, Facts
from ..guards.attribute_guard import AttributeGuard
from ..guards.signature import signature
from ..guards.variable_scope import Reads
from ..system.user_warning import warn_user
from ..tensors.pytree import flatten
from .planned_stage import PlannedStage
from .stage_cut import StageCut

MANY = 6  # kinds of mini-batches that are warned of
KINDS = 16  # kinds of mini-batches whose plans are kept
StagesByChunk = Mapping[int, Sequence[PlannedStage]]  # by the numbers of stages


@dataclass(frozen=True, eq=False)
class MiniBatchPlan:
    """The stages of a rank for one mini-batch, and the order in which it runs them.

    Attributes:
        stages: the stage for each micro-batch, by the numbers of the rank's stages.
        owners: the stages that have each parameter that gets a gradient.
        peak, peaks: forecast bytes of this rank, and of each.
        times: forecast times of each stage of all ranks, for its first micro-batch.
    """

    schedule: PipelineSchedule
    stages: StagesByChunk
    owners: Mapping[str, tuple[int, ...]]
    peak: int
    peaks: tuple[int, ...]
    times: tuple[StageTimes, ...]

    @property
    def cut(self) -> StageCut:
        """Return the cut of the first micro-batch."""
        return next(iter(self.stages.values()))[0].cut

    @property
    def reads(self) -> list[Reads]:
        """Return what the step of each micro-batch rests on."""
        return [stage.cut.step.captured.reads for stage in next(iter(self.stages.values()))]

    @property
    def drawn(self) -> list[tuple[int, ...] | None]:
        """Return how many random numbers each stage draws for each micro-batch; None if that is not known before."""
        return [stage.cut.drawn for stage in next(iter(self.stages.values()))]

    @property
    def draws(self) -> bool:
        """Return True if an op draws random numbers."""
        return any(stage.cut.step.draws for stage in next(iter(self.stages.values())))

    @property
    def gradients(self) -> list[str]:
        """Return the parameters of this rank that get gradients."""
        return [name for name, stages in self.owners.items() if not self.stages.keys().isdisjoint(stages)]

    @property
    def arguments(self) -> list[list[str]]:
        """Return the names of all inputs of the step, for each micro-batch."""
        return [stage.arguments for stage in next(iter(self.stages.values()))]

    @property
    def input_gradients(self) -> list[list[str]]:
        """Return the inputs whose gradients this rank makes, for each micro-batch."""
        return [
            [name for stage in each for _, name in stage.input_gradients]
            for each in zip(*self.stages.values(), strict=True)
        ]


class KeptPlans:
    """The plans of the latest kinds of mini-batches of a module, by what they assume of a call."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = AttributeGuard(module)
        self._plans: list[tuple[Assumptions, MiniBatchPlan]] = []  # the latest last
        self._warned = False

    def has(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if there is a plan for a call."""
        facts = self._facts(args, kwargs)
        return any(assumptions.holds(facts) for assumptions, _ in self._plans)

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MiniBatchPlan | None:
        """Return the plan of a call, which is kept no longer: its facts change when parameters move."""
        facts = self._facts(args, kwargs)
        for i, (assumptions, plan) in enumerate(self._plans):
            if assumptions.holds(facts):
                del self._plans[i]
                return plan
        return None

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: MiniBatchPlan) -> None:
        """Keep the plan of a call as the latest; warn once of many kinds."""
        for reads in plan.reads:
            self._attributes.grow(reads)
        self._plans.append((Assumptions(self._facts(args, kwargs)), plan))
        if len(self._plans) == MANY and not self._warned:
            self._warned = True
            warn_user(
                f"{MANY} kinds of mini-batches were captured and planned; if their shapes vary, "
                "memgraph.pad_to_buckets pads them to a few"
            )
        del self._plans[:-KINDS]

    @property
    def latest(self) -> MiniBatchPlan:
        return self._plans[-1][1]

    def _facts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Facts:
        leaves, spec = flatten((args, kwargs))
        facts = signature(spec, leaves, self._attributes)
        self._attributes.taken()  # tensors of other stages are to go
        return facts
