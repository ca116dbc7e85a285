"""The step of a call once gradients exist: does it fit the budget too?

    budget 17.0 MB; the first step needs 16.8, one that adds to its gradients 17.9   ->   AccumulatedStep(17.9 MB, None)

Gradients exist from the second call on if a loop accumulates, or zeroes them with `set_to_none=False`.  A budget
without room for that is reported before the first step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor, nn

import passes
from passes import BrokenTrace, Machine, Op, Plan, PlanResult, Storage, Trace, apply, check, make_plan, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp.problem import PlanProblem
from passes.pipeline import FITTING

from ..profile.memory_meter import resident_bytes
from ..runtime.released_outputs import most_released, search_with_released
from ..system.user_warning import warn_user

LEFT = "left_gradients"
Search = Callable[[Trace, Machine], PlanResult]


@dataclass(frozen=True)
class AccumulatedStep:
    """A step that adds to gradients.

    Attributes:
        needed: bytes for which a plan is known.
        plan: one within the budget; None if none was found.
    """

    needed: int = 0
    plan: Plan | None = None


def plan_accumulated(
    trace: Trace, machine: Machine, tries: Sequence[Plan], search: Search, until: float = math.inf
) -> AccumulatedStep:
    """Find a plan of the step that adds to gradients.

    First come `tries`, plans that are known, then the quick passes, and at last `search`, unless a lower bound excludes
    that it finds one, or time is up, in seconds of `time.monotonic`.  Without tries there is only the search.
    """
    for known in tries:
        peak = peak_with(known, trace, machine)
        if peak is not None and peak <= machine.budget:
            return AccumulatedStep(peak, known)
    for find in (_quick, search) if tries else (search,):
        try:
            choice = find(trace, machine)
        except passes.BudgetError as error:
            smallest = error.smallest
            floor = PlanProblem(ReuseGaps(most_released(trace)), machine).floor.max(initial=0)
            if floor > machine.budget or time.monotonic() >= until:
                break
        else:
            return AccumulatedStep(choice.forecast.peak, choice.plan)
    return AccumulatedStep(smallest, None)


def peak_with(plan: Plan, trace: Trace, machine: Machine) -> int | None:
    """Return the peak of a step with a plan made for another step; None if the plan can't be applied."""
    with suppress(ValueError, KeyError, BrokenTrace):
        applied = apply(trace, plan)
        check(applied)
        return predict(applied, machine).peak
    return None


def with_remaining_grads(trace: Trace, module: nn.Module, trained: Iterable[Tensor]) -> Trace:
    """Return the trace with existing gradients of other steps, as when a model is evaluated between steps."""
    own = set(map(id, trained))
    left = [
        parameter.grad for parameter in module.parameters() if parameter.grad is not None and id(parameter) not in own
    ]
    if not (nbytes := resident_bytes(left)):
        return trace
    op = Op(LEFT, "buffer", makes=(Storage(LEFT, nbytes),), holds=(LEFT,), where="gradients of other steps")
    return replace(trace, ops=(op, *trace.ops))


def warn_accumulation(accumulated: AccumulatedStep, budget: int) -> None:
    """Warn before the first step if a later one needs more than the budget."""
    if accumulated.plan is None:
        warn_user(
            f"this step fits its budget of {budget} bytes; for one that adds to gradients, as with accumulation or "
            f"zero_grad(set_to_none=False), the smallest budget for which a plan was found is {accumulated.needed}: "
            f"give budget={accumulated.needed} for both, or accumulate=False if gradients are always set to None "
            "between steps"
        )


def or_known(search: Search, plan: Plan | None) -> Search:
    """Return a search that falls back on a known plan: the caller was told that the step fits."""

    def find(trace: Trace, machine: Machine) -> PlanResult:
        try:
            return search(trace, machine)
        except passes.BudgetError:
            peak = None if plan is None else peak_with(plan, trace, machine)
            if plan is None or peak is None or peak > machine.budget:
                raise
            return PlanResult(plan, predict(trace, machine), predict(apply(trace, plan), machine))

    return find


def _quick(trace: Trace, machine: Machine) -> PlanResult:
    return search_with_released(lambda trace, machine: make_plan(trace, machine, FITTING), trace, machine)
