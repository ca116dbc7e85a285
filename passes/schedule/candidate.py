"""A candidate plan: the placement of each storage, and what the simulator says of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.reuse_gaps import Gaps
from ..ir.decisions import Plan, apply
from ..ir.machine import Machine
from ..simulate.forecast import Forecast, predict
from .schedule import Fate, schedule


@dataclass(frozen=True, eq=False)
class State:
    """The fates of the storages so far, in the order in which they were given up, the plan, and what it comes to."""

    fates: dict[str, Fate]
    plan: Plan
    forecast: Forecast

    @property
    def peak(self) -> int:
        return self.forecast.peak


def state_of(gaps: Gaps, machine: Machine, fates: dict[str, Fate]) -> State:
    plan = schedule(gaps, fates, machine)
    return State(fates, plan, predict(apply(gaps.trace, plan), machine))
