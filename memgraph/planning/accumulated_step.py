"""The step of a call once gradients exist: does it fit the budget too?

    budget 17.0 MB; the first step needs 16.8, one that adds to its gradients 17.9   ->   AccumulatedStep(17.9 MB, None)

Gradients exist from the second call on if a loop accumulates, or zeroes them with `set_to_none=False`.  A budget
without room for that is reported before the first step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

import passes
from passes import Machine, Op, Plan, PlanResult, Storage, Trace, make_plan
from passes.lp.problem import proven_nbytes
from passes.pipeline import FITTING
from passes.simulate.plan_result import try_plan

from ..profile.memory_meter import resident_bytes
from ..runtime.released_outputs import most_released
from ..system.user_warning import warn_user
from ..tensors.gradients import existing_gradients
from .search import search_with_released

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
        result = try_plan(known, trace, machine)
        if result and result.forecast.peak <= machine.budget:
            return AccumulatedStep(result.forecast.peak, known)
    step = AccumulatedStep()
    for find in (_quick, search) if tries else (search,):
        try:
            choice = find(trace, machine)
        except passes.BudgetError as error:
            step = AccumulatedStep(error.smallest)
            least = proven_nbytes(most_released(trace), machine)
            if least > machine.budget or time.monotonic() >= until:
                break
        else:
            return AccumulatedStep(choice.forecast.peak, choice.plan)
    return step


def with_remaining_grads(trace: Trace, module: nn.Module, trained: Iterable[Tensor]) -> Trace:
    """Return the trace with existing gradients of other steps, as when a model is evaluated between steps."""
    own = set(map(id, trained))
    left = existing_gradients(parameter for parameter in module.parameters() if id(parameter) not in own)
    return with_resident(trace, LEFT, resident_bytes(left), "gradients of other steps")


def with_resident(trace: Trace, name: str, nbytes: int, where: str) -> Trace:
    """Return the trace with bytes that others than the step hold on the device, if there are any."""
    op = Op(name, "buffer", makes=(Storage(name, nbytes),), holds=(name,), where=where)
    return replace(trace, ops=(op, *trace.ops)) if nbytes else trace


def warn_accumulation(accumulated: AccumulatedStep, budget: int) -> None:
    """Warn before the first step if a later one needs more than the budget."""
    if accumulated.plan is None:
        warn_user(
            f"this step fits its budget of {budget} bytes; for one that adds to gradients, as with accumulation or "
            f"zero_grad(set_to_none=False), the smallest budget for which a plan was found is {accumulated.needed}: "
            f"give budget={accumulated.needed} for both, or accumulate=False if gradients are always set to None "
            "between steps"
        )


def _quick(trace: Trace, machine: Machine) -> PlanResult:
    return search_with_released(lambda trace, machine: make_plan(trace, machine, FITTING), trace, machine)
