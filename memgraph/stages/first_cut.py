"""The cut of the first call, which later calls follow.

rank 0 has wte and h.0, rank 1 has h.1    ->    the same parameters on the same ranks for another length
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.stages.owned_cut import begins_by_owners

from ..oss.comm.watchdog import CollectiveWatchdog
from .arguments import PipelineArguments
from .rank_stages import RankStages
from .stage_budget import StageParameters
from .stage_cut import StageCut
from .whole_step import WholeStep


@dataclass(frozen=True, eq=False)
class FirstCut:
    """The cut of the first call.

    Attributes:
        owned: names of the parameters and buffers of each stage.
        parameters: bytes that follow from those of each stage of this rank.
        given: the arguments, with the schedule that was chosen.
        updates_nbytes: bytes that the optimizer's states and its update would take for all parameters.
        replicas: the ranks that have the same stages in other pipelines, if they are known.
        stages: of this rank in the first call, where no forward waits for the gradients of parameters.
    """

    cut: StageCut
    owned: tuple[frozenset[str], ...]
    parameters: Mapping[int, StageParameters]
    given: PipelineArguments
    updates_nbytes: int
    replicas: CollectiveWatchdog | None = None
    stages: RankStages | None = None

    def kept(self, rank: int, ranks: int) -> frozenset[str]:
        """Return the names of the parameters and buffers of a rank."""
        return frozenset().union(*self.owned[rank::ranks])

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
