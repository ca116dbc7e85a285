"""Captures that stand in the place of a new one.

the same call adds to gradients now   ->   its graph, and a plan that fits
the same call with another length     ->   the graph with symbols, at that length
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from passes import Plan, Trace

from ..graph.captured import Captured
from .lengths.general_steps import GeneralSteps


@dataclass(frozen=True, eq=False)
class EarlierCapture:
    """A capture of the same call, and a plan that fits when it adds to gradients.

    Attributes:
        all_outputs: bytes that backward from all outputs needs, if they are too many and it starts from scalars alone.
    """

    captured: Captured
    accumulated_plan: Plan | None = None
    all_outputs: int = 0


@dataclass(frozen=True, eq=False)
class KnownLength:
    """The capture with symbols that serves a call; stands where a call is captured.

    Attributes:
        lengths: by symbol, in this call.
        nearby: the priced trace of the same ops with another length.
    """

    general: GeneralSteps
    lengths: Sequence[int]
    nearby: Trace | None

    def __call__(self, *call: Any) -> Captured:
        return self.general.capture.at(self.lengths)
