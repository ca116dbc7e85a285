"""Plans in the place of those that are searched for: what becomes of each storage is given, and not weighed.

    monkeypatch.setattr(search, "make_plan", all_given_up)

The fixtures of `fixtures.py` do that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from memgraph.storage.io_threads import STAGING
from passes import Machine, PlanResult, Trace, apply, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.schedule.schedule import Placement, schedule

FATES = (
    Placement.RECOMPUTE_PER_USE,
    Placement.RECOMPUTE,
    Placement.OFFLOAD,
    Placement.OFFLOAD_BLOCKING,
    Placement.RELOAD_PER_USE,
    Placement.RECOMPUTE_PER_USE,
)


def all_given_up(trace: Trace, machine: Machine, log: object = None, seconds: float = 0.0) -> PlanResult:
    """Every storage is made again or sent away, which of it by its name."""
    gaps, fates = ReuseGaps(trace), dict[str, Placement]()
    for storage in gaps.producer:
        once, away = trace.op[gaps.producer[storage]].once, storage in gaps.whole_value
        legal = [
            fate for fate in FATES if (not once if fate in (Placement.RECOMPUTE_PER_USE, Placement.RECOMPUTE) else away)
        ]
        fates[storage] = legal[zlib.crc32(storage.encode()) % len(legal)] if legal else Placement.KEEP
    return choice(gaps, fates, linked(machine))


def given_up(fate: Placement) -> Callable[[Trace, Machine], PlanResult]:
    """One fate for all."""

    def make_plan(trace: Trace, machine: Machine, log: object = None, seconds: float = 0.0) -> PlanResult:
        gaps = ReuseGaps(trace)
        if fate is Placement.OFFLOAD_BLOCKING:
            chosen = [storage for storage in gaps.whole_value if storage in gaps.uses]
        else:
            chosen = [storage for storage in gaps.producer if not trace.op[gaps.producer[storage]].once]
        return choice(gaps, dict.fromkeys(chosen, fate), linked(machine))

    return make_plan


def choice(gaps: ReuseGaps, fates: Mapping[str, Placement], machine: Machine) -> PlanResult:
    """What a search says that has found these fates the best."""
    plan = schedule(gaps, fates, machine)
    return PlanResult(plan, predict(gaps.trace, machine), predict(apply(gaps.trace, plan), machine))


def linked(machine: Machine) -> Machine:
    """With a disk, whatever it has."""
    return replace(machine, link=replace(machine.link, out=100.0, back=100.0, staging=STAGING))
