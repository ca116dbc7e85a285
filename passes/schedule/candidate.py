"""A candidate plan: the placement of each storage, and what the simulator says of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Plan, apply
from ..ir.machine import Machine
from ..simulate.forecast import Forecast, predict
from .schedule import Placement, schedule


@dataclass(frozen=True, eq=False)
class Candidate:
    """The fates of the storages so far, in the order in which they were given up, the plan, and what it comes to."""

    placements: dict[str, Placement]
    plan: Plan
    forecast: Forecast

    @property
    def peak(self) -> int:
        return self.forecast.peak


def make_candidate(gaps: ReuseGaps, machine: Machine, fates: dict[str, Placement]) -> Candidate:
    plan = schedule(gaps, fates, machine)
    return Candidate(fates, plan, predict(apply(gaps.trace, plan), machine))
