"""The stages of a rank for the micro-batches of one mini-batch.

7 rows in 4 micro-batches    ->    the stage for 2 rows, three times, and the stage for 1 row
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .action_order import StageOrder
from .planned_stage import PlannedStage


@dataclass(frozen=True, eq=False)
class MiniBatchPlan:
    """The stages of a rank for one mini-batch, and the order in which it runs them.

    Attributes:
        stages: the stage for each micro-batch.
        owners: the stages that have each parameter that gets a gradient.
        peak: forecast bytes of the rank.
    """

    order: StageOrder
    stages: tuple[PlannedStage, ...]
    owners: Mapping[str, tuple[int, ...]]
    peak: int

    @property
    def gradients(self) -> list[str]:
        """Return the parameters of this rank that get gradients."""
        return [name for name, stages in self.owners.items() if self.order.stage in stages]


def largest_peak(order: StageOrder, stages: tuple[PlannedStage, ...]) -> int:
    """Return the bytes of a rank if forwards of all these stages may be open at once."""
    others = order.open_forwards - 1
    alone = max(stage.peak - others * stage.open_nbytes for stage in stages)
    return alone + others * max(stage.open_nbytes for stage in stages)
