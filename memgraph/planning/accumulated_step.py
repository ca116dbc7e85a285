"""The step of a call that adds to gradients, beside that of the same call when there are none: does it fit as well?

    budget 17.0 MB, the first step needs 16.8, one that adds to its gradients 17.9   ->   Adding(needed=17.9 MB)

Gradients are there from the second call on if a loop accumulates, or sets them to zeros and not to None.  A budget that
has no room for that is named before the first step, and not after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor, nn

import passes
from passes import BrokenTrace, Machine, Op, Plan, PlanResult, Storage, Trace, apply, check, make_plan, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp.problem import PlanProblem
from passes.pipeline import QUICK

from ..profile.memory_meter import resident_bytes
from ..runtime.released_outputs import most_released, search_with_released
from ..system.user_warning import warn_user

LEFT = "left_gradients"
Search = Callable[[Trace, Machine], PlanResult]


@dataclass(frozen=True)
class AccumulatedStep:
    """What a call needs that adds to gradients.

    Attributes:
        needed: bytes for which a plan is known.
        plan: one within the budget; None if none was found.
    """

    needed: int
    plan: Plan | None


def plan_accumulated(trace: Trace, machine: Machine, tries: Sequence[Plan], search: Search) -> AccumulatedStep:
    """Look for a plan of the step that adds to gradients: `tries` that cost nothing, as that of the step that adds to
    none, the quick passes, and only then, if one is possible, a `search`; that alone, if there are no tries."""
    for known in tries:
        peak = peak_with(known, trace, machine)
        if peak is not None and peak <= machine.budget:
            return AccumulatedStep(peak, known)
    for find in (_quick, search) if tries else (search,):
        try:
            choice = find(trace, machine)
        except passes.BudgetError as error:
            smallest = error.smallest
            if PlanProblem(ReuseGaps(most_released(trace)), machine).floor.max(initial=0) > machine.budget:
                break
        else:
            return AccumulatedStep(choice.forecast.peak, choice.plan)
    return AccumulatedStep(smallest, None)


def peak_with(plan: Plan, trace: Trace, machine: Machine) -> int | None:
    """Bytes of the step with a plan that was made for another one; None if it can't be carried out on this one."""
    with suppress(ValueError, KeyError, BrokenTrace):
        applied = apply(trace, plan)
        check(applied)
        return predict(applied, machine).peak
    return None


def with_remaining_grads(trace: Trace, module: nn.Module, trained: Iterable[Tensor]) -> Trace:
    """The step with the gradients that lie there and are none of its own, as those of a training while its model is
    evaluated."""
    own = set(map(id, trained))
    left = [one.grad for one in module.parameters() if one.grad is not None and id(one) not in own]
    if not (nbytes := resident_bytes(left)):
        return trace
    op = Op(LEFT, "buffer", makes=(Storage(LEFT, nbytes),), holds=(LEFT,), where="gradients of other steps")
    return replace(trace, ops=(op, *trace.ops))


def warn_accumulation(found: AccumulatedStep, budget: int) -> None:
    """Say before the first step what a later one needs, if that is more than the budget."""
    if found.plan is None:
        warn_user(
            f"this step fits its budget of {budget} bytes; for one that adds to gradients, as with accumulation or "
            f"zero_grad(set_to_none=False), the smallest budget for which a plan was found is {found.needed}: give "
            f"budget={found.needed} for both, or accumulate=False if gradients are always set to None between steps"
        )


def or_known(search: Search, plan: Plan | None) -> Search:
    """The same search, which finds this plan where it finds none that fits: that the step fits has been said."""

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
    return search_with_released(lambda trace, machine: make_plan(trace, machine, QUICK), trace, machine)
