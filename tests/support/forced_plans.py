"""Plans with given placements, in place of the search.

    monkeypatch.setattr(search, "make_plan", all_given_up)

The fixtures of `fixtures.py` use them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memgraph.stages.stage_planner import StagePlanner
from memgraph.storage.io_threads import STAGING
from passes import Machine, PlanResult, Trace, apply, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.concurrent_forwards import with_plan
from passes.schedule.schedule import Placement, schedule

if TYPE_CHECKING:  # benchmarks run where pytest is not installed
    import pytest

FATES = (
    Placement.RECOMPUTE_PER_USE,
    Placement.RECOMPUTE,
    Placement.OFFLOAD,
    Placement.OFFLOAD_BLOCKING,
    Placement.RELOAD_PER_USE,
    Placement.RECOMPUTE_PER_USE,
)


def all_given_up(
    trace: Trace, machine: Machine, log: object = None, seconds: float = 0.0, interruptible: bool = False
) -> PlanResult:
    """Recompute or offload every storage; a hash of its name selects the placement."""
    gaps, fates = ReuseGaps(trace), dict[str, Placement]()
    for storage in gaps.producer:
        once, away = trace.op[gaps.producer[storage]].once, storage in gaps.whole_value
        legal = [
            fate for fate in FATES if (not once if fate in (Placement.RECOMPUTE_PER_USE, Placement.RECOMPUTE) else away)
        ]
        fates[storage] = legal[zlib.crc32(storage.encode()) % len(legal)] if legal else Placement.KEEP
    return choice(gaps, fates, linked(machine))


def given_up(fate: Placement) -> Callable[[Trace, Machine], PlanResult]:
    """Return a planner that has one placement for all storages."""

    def make_plan(
        trace: Trace, machine: Machine, log: object = None, seconds: float = 0.0, interruptible: bool = False
    ) -> PlanResult:
        gaps = ReuseGaps(trace)
        if fate is Placement.OFFLOAD_BLOCKING:
            chosen = [storage for storage in gaps.whole_value if storage in gaps.uses]
        else:
            chosen = [storage for storage in gaps.producer if not trace.op[gaps.producer[storage]].once]
        return choice(gaps, dict.fromkeys(chosen, fate), linked(machine))

    return make_plan


def choice(gaps: ReuseGaps, fates: Mapping[str, Placement], machine: Machine) -> PlanResult:
    """Return the result of a search that would select these placements."""
    plan = schedule(gaps, fates, machine)
    return PlanResult(plan, predict(gaps.trace, machine), predict(apply(gaps.trace, plan), machine))


def linked(machine: Machine) -> Machine:
    """Return the machine with a link to a disk."""
    return replace(machine, link=replace(machine.link, out=100.0, back=100.0, staging=STAGING))


def offloading(patch: pytest.MonkeyPatch) -> None:
    """Let the stages of a pipeline recompute or offload all that they can."""

    def plan(trace: Trace, machine: Machine, count: int, search: object, until: float) -> PlanResult:
        return with_plan(trace, machine, count, all_given_up(trace, machine).plan)

    known = StagePlanner._machine
    patch.setattr(StagePlanner, "_machine", lambda planner, budget: linked(known(planner, budget)))
    patch.setattr("memgraph.stages.stage_planner.fitting_forwards", plan)
