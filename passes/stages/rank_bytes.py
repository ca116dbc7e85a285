"""The most bytes of a rank with several stages, which run one at a time.

stage 0 keeps 10, 5 for an open forward, and takes 40 while it runs      ->    at F2: 20 + 40 + 5 (stage 0, open once)
stage 2 keeps 20, 3 for an open forward, and takes 30 while it runs            at B2: 10 + 2 * 5 (stage 0) + 30

An action of a stage finds the forwards of all stages open that the order of the rank's actions says, no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ..ir.trace import OTHER_FORWARDS
from ..simulate.forecast import Forecast
from .action import FORWARD
from .interval_costs import RESIDENT
from .pipeline_schedule import Moment


@dataclass(frozen=True)
class StageBytes:
    """The bytes of a stage.

    Attributes:
        kept: between its runs, without open forwards.
        open: of each forward that is open and does not run.
        forward, backward: the most while one runs and no other is open.
    """

    kept: int
    open: int
    forward: int
    backward: int

    @classmethod
    def of(cls, forecast: Forecast, beside: int, given: int) -> StageBytes:
        """Return the bytes of a planned stage.

        Args:
            beside: bytes that always lie beside its step.
            given: those of them that are inputs of the step as well, which lie there once.
        """
        trace, boundary = forecast.trace, forecast.trace.boundary
        resident = {op.name for op in trace.ops if op.fn in RESIDENT}
        lives = [life for life in forecast.lifetimes if life.producer != OTHER_FORWARDS]
        kept = sum(life.nbytes for life in lives if life.producer in resident) + forecast.staging + beside
        if boundary < len(trace.ops):
            moved = (life for life in lives if life.producer not in resident)
            each = sum(life.nbytes for life in moved if life.first < boundary <= life.last) - given
        else:  # `beside` has what it sends, but for that of the forward that ran last
            held = trace.held_by(value for _, value in trace.outputs)
            kept, each = kept + sum(trace.nbytes[storage] for storage in held), 0
        alone = forecast.total - trace.other_nbytes + beside - given
        forward, backward = (int(half.max(initial=kept)) for half in (alone[:boundary], alone[boundary:]))
        return cls(kept, each, forward, backward)

    @classmethod
    def largest(cls, every: Collection[StageBytes]) -> StageBytes:
        """Return what is enough for each micro-batch, if they have other sizes."""
        return cls(
            max(each.kept for each in every),
            max(each.open for each in every),
            max(each.forward for each in every),
            max(each.backward for each in every),
        )


def rank_peak(moments: Iterable[Moment], stages: Mapping[int, StageBytes]) -> int:
    """Return the most bytes of a rank: at each moment one stage runs, and the others hold their open forwards."""
    return max(_nbytes(moment, stages) for moment in moments)


def _nbytes(moment: Moment, stages: Mapping[int, StageBytes]) -> int:
    running, nbytes = stages[moment.stage], 0
    for (number, each), count in zip(sorted(stages.items()), moment.open, strict=True):
        nbytes += count * each.open + (0 if number == moment.stage else each.kept)
    return nbytes - running.open + (running.forward if moment.kind == FORWARD else running.backward)
