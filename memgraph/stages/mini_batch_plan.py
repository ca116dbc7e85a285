"""The stages of a rank for the micro-batches of one mini-batch.

7 rows in 4 micro-batches    ->    the stage for 2 rows, three times, and the stage for 1 row
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.timeline import StageTimes

from ..guards.what_ran import Reads
from ..system.user_warning import warn_user
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
    """The plans of the latest kinds of mini-batches, by the keys of their calls."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, MiniBatchPlan] = {}  # the latest last
        self._warned = False

    def take(self, key: Hashable) -> MiniBatchPlan | None:
        """Return a plan, which is kept no longer: its key changes when parameters move."""
        return self._plans.pop(key, None)

    def rekey(self, grown: Callable[[Hashable], Hashable]) -> None:
        """Replace all keys."""
        self._plans = {grown(key): plan for key, plan in self._plans.items()}

    def keep(self, key: Hashable, plan: MiniBatchPlan) -> None:
        """Keep a plan as the latest; warn once of many kinds."""
        self._plans[key] = plan
        if len(self._plans) == MANY and not self._warned:
            self._warned = True
            warn_user(
                f"{MANY} kinds of mini-batches were captured and planned; if their shapes vary, "
                "memgraph.pad_to_buckets pads them to a few"
            )
        if len(self._plans) > KINDS:
            del self._plans[next(iter(self._plans))]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._plans

    @property
    def latest(self) -> MiniBatchPlan:
        return self._plans[next(reversed(self._plans))]
