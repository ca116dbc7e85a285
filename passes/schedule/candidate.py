"""A candidate plan: the placement of each storage, and the forecast of the step."""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Plan, apply
from ..ir.machine import Machine
from ..simulate.forecast import Forecast, predict
from .schedule import Placement, schedule


@dataclass(frozen=True, eq=False)
class Candidate:
    """The placements that differ from keep, in the order of their choice, the plan, and its forecast."""

    placements: dict[str, Placement]
    plan: Plan
    forecast: Forecast

    @property
    def peak(self) -> int:
        return self.forecast.peak


def make_candidate(gaps: ReuseGaps, machine: Machine, placements: dict[str, Placement]) -> Candidate:
    plan = schedule(gaps, placements, machine)
    return Candidate(placements, plan, predict(apply(gaps.trace, plan), machine))
