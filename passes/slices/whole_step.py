"""The plan of a step without slices, beside that of the same step in slices: the faster one counts.

in slices 41.2 ms; whole 40.1 ms, at least 40.0   ->   whole; no plan of either kind takes less than 40.0 ms
in slices 41.2 ms; whole: at least 41.0 ms        ->   in slices, and no search for a plan of the whole

Slices take time of their own: smaller products, sums that are read and written once a part. Near the bytes that a step
needs without a plan, to recompute or offload a little may take less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..lp.problem import PlanProblem
from ..simulate.forecast import predict
from ..simulate.plan_result import PlanResult

WORTH = 0.01  # of the step's time: what the plan of the whole has to save for a search
ROUGH = 0.02  # the same where ops were timed by a single run

Search = Callable[[Trace, Machine, float], PlanResult]  # for plans that take less than so many microseconds


def has_room(whole: Trace, machine: Machine) -> bool:
    """Return False if no plan of a step fits, as its text without prices shows."""
    return PlanProblem(ReuseGaps(whole), machine).least_nbytes <= machine.budget


def may_gain(sliced: PlanResult, whole_us: float, is_rough: bool) -> bool:
    """Return True if a step that takes so long without slices and without a plan is worth pricing."""
    return whole_us < (1 - (ROUGH if is_rough else WORTH)) * sliced.forecast.us


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
