"""The plan of a step without slices, beside a plan of the same step in slices: the faster one counts.

in slices 41.2 ms; whole 40.1 ms, at least 40.0   ->   whole; no plan of either kind takes less than 40.0 ms
in slices 41.2 ms; whole: at least 41.0 ms        ->   in slices, and no search for a plan of the whole
in slices 41.2 ms without a plan                  ->   in slices

Slices take time of their own: smaller products, sums that are read and written once a part. To recompute or offload a
little more without them may take less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.machine import Machine
from ..ir.trace import Trace
from ..lp.problem import proven_nbytes
from ..simulate.forecast import predict
from ..simulate.plan_result import PlanResult

WORTH = 0.01  # of the step's time: what the plan of the whole has to save for a search

Search = Callable[[Trace, Machine, float], PlanResult]  # for plans that take less than so many microseconds


def has_room(whole: Trace, machine: Machine) -> bool:
    """Return False if no plan of a step fits, as its text without prices shows."""
    return proven_nbytes(whole, machine) <= machine.budget


def needs_none(sliced: PlanResult) -> bool:
    """Return True if the step fits in slices as it is, so that nothing may be faster.

    It takes slices alone. A plan of the whole would take copies or recomputations.
    """
    return not sliced.plan


def whole_plan(sliced: PlanResult, whole: Trace, machine: Machine, search: Search) -> PlanResult:
    """Return what is known of a step without slices: a plan, or only bounds if none is as fast as is worth a search."""
    captured, enough_us = predict(whole, machine), (1 - WORTH) * sliced.forecast.us
    if captured.us >= enough_us:
        return PlanResult((), captured, captured)
    return search(whole, machine, enough_us)


def is_faster(whole: PlanResult, sliced: PlanResult, budget: int) -> bool:
    """Return True if the plan of the whole counts. It rounds as eager does, so it need not be faster."""
    return whole.forecast.peak <= budget and whole.forecast.us <= sliced.forecast.us


def among(chosen: PlanResult, other: PlanResult) -> PlanResult:
    """Return the plan that was chosen, with what is proven of the other kind."""
    return replace(chosen, others=other.least)
