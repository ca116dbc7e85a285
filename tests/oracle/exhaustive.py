"""The least time that any choice of fates adds to a step under a budget, found by trying them all.

    cheapest(trace, 6108)                -> 5.0      every subset of the movable storages is kept, the rest is recomputed
    cheapest_of_all(trace, machine)      -> 2.0      every fate of every movable storage
    cheapest(trace, 10)                  -> None     nothing fits

For about 12 movable storages, and about 6 where there is a far tier.  `predict` alone says what fits and what it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from passes import Machine, Offload, Plan, Recompute, Trace, apply, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.schedule.schedule import Placement, schedule
from tests.support.strategies import ways

Choices = Mapping[str, Sequence[Placement]]


def cheapest(trace: Trace, budget: int) -> float | None:
    """The least added microseconds over all keep-sets; None if none fits."""
    found = best_keep_set(trace, budget)
    return found[0] if found else None


def cheapest_of_all(trace: Trace, machine: Machine) -> float | None:
    """The least added microseconds over all fates that `machine` allows; None if none fits its budget."""
    found = best_fates(trace, machine)
    return found[0] if found else None


def best_keep_set(trace: Trace, budget: int) -> tuple[float, Plan] | None:
    """Return the result of `cheapest`, and its plan."""
    gaps = ReuseGaps(trace)
    return best_of(gaps, keep_or_recompute(gaps), Machine(budget))


def best_fates(trace: Trace, machine: Machine) -> tuple[float, Plan] | None:
    """Return the result of `cheapest_of_all`, and its plan."""
    gaps = ReuseGaps(trace)
    return best_of(gaps, all_fates(gaps, machine), machine)


def keep_or_recompute(gaps: ReuseGaps) -> Choices:
    """For each movable storage whether it is kept; what may run once is."""
    return {s: (Placement.KEEP,) if gaps.trace.op[made].once else (Placement.KEEP, Placement.RECOMPUTE) for s, made in gaps.producer.items()}  # fmt: skip


def all_fates(gaps: ReuseGaps, machine: Machine) -> Choices:
    """Add recomputation for each use and, if there is a tier, all ways to offload, cast or not."""
    linked = machine.link.out > 0 and machine.link.back > 0
    return {
        storage: (
            *fates,
            *((Placement.RECOMPUTE_PER_USE,) if len(fates) > 1 else ()),
            *(ways(gaps, storage, machine.cast.dtype) * linked),
        )
        for storage, fates in keep_or_recompute(gaps).items()
    }


def best_of(gaps: ReuseGaps, choices: Choices, machine: Machine) -> tuple[float, Plan] | None:
    """The plan that fits and adds least.  No plan adds less than its re-runs take: those of cheap ones come first."""
    plain = predict(gaps.trace, machine).us
    found: tuple[float, Plan] | None = None
    for plan in sorted(set(_plans(gaps, choices, machine)), key=lambda plan: (_rerun_us(gaps, plan), len(plan))):
        if found and _rerun_us(gaps, plan) >= found[0]:
            break
        forecast = predict(apply(gaps.trace, plan), machine)
        if forecast.peak <= machine.budget and (found is None or forecast.us - plain < found[0]):
            found = forecast.us - plain, plan
    return found


def _plans(gaps: ReuseGaps, choices: Choices, machine: Machine) -> Iterator[Plan]:
    """The plan of every choice whose copies the far tier has room for."""
    for fates in itertools.product(*choices.values()):
        plan = schedule(gaps, dict(zip(choices, fates, strict=True)), machine)
        sent = ((gaps.trace.op[d.value].holds[0], d.wire) for d in plan if isinstance(d, Offload))
        if (
            sum(gaps.wire_nbytes(s, wire) if wire else gaps.trace.nbytes[s] for s, wire in sent)
            <= machine.link.capacity
        ):
            yield plan


def _rerun_us(gaps: ReuseGaps, plan: Plan) -> float:
    return sum(gaps.trace.op[decision.value].us for decision in plan if isinstance(decision, Recompute))
