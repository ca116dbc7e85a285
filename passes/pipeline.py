"""The passes, in the order in which they run, and the loop that runs them.

A pass looks at a trace and a machine and returns decisions: those after which the step fits the budget, or, if it finds
none, those that bring the peak lowest.  It changes nothing, logs nothing, and may count on `check(trace)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .decisions import Plan, apply
from .errors import BudgetError
from .forecast import Forecast, predict
from .greedy import descend, descend_at_home
from .invariants import check
from .machine import Machine
from .trace import Trace

TOP = 8  # of what is in the way, so many are named

Pass = Callable[[Trace, Machine], Plan]
Log = Callable[[str], None]

# The first whose plan fits ends the search.  The second helps where the far tier's staging is more than it would free.
PASSES: tuple[Pass, ...] = (descend, descend_at_home)


@dataclass(frozen=True, eq=False)
class Choice:
    """A plan, the step as captured and as it will run, each with its forecast."""

    plan: Plan
    captured: Forecast
    forecast: Forecast


def quiet(line: str) -> None:
    """Log nothing."""


def make_plan(trace: Trace, machine: Machine, passes: tuple[Pass, ...] = PASSES, log: Log = quiet) -> Choice:
    """The plan of the first pass with which the step fits; no decisions at all, if the step fits as it is.

    Raises:
        BudgetError: no pass finds a plan that fits.
    """
    check(trace)
    captured = predict(trace, machine)
    log(f"{'captured':<16} {captured}")
    best = Choice((), captured, captured)
    for find in passes:
        if best.forecast.peak <= machine.budget:
            break
        plan = find(trace, machine)
        applied = apply(trace, plan)
        check(applied)
        choice = Choice(plan, captured, predict(applied, machine))
        log(f"{find.__name__:<16} {choice.forecast}")
        best = min(best, choice, key=lambda choice: choice.forecast.peak)
    if best.forecast.peak > machine.budget:
        raise BudgetError(_over(best.forecast, machine), machine.budget, best.forecast.peak)
    return best


def _over(forecast: Forecast, machine: Machine) -> str:
    """What was wanted, what is, where, and what to do."""
    op = forecast.trace.ops[forecast.at]
    lines = [
        f"{machine.budget} bytes are allowed; the smallest budget for which a plan was found is {forecast.peak}.",
        f"It needs most at {op.name} ({', '.join(filter(None, (op.fn, op.where)))}); on {machine.device} lie there:",
    ]
    there = forecast.alive(forecast.at)
    for life in there[:TOP]:
        maker = forecast.trace.op[life.maker]
        lines.append(f"  {life.nbytes:>14} bytes  {life.kind:<10} {life.storage} {maker.type} {maker.where}".rstrip())
    rest = forecast.peak - op.workspace - sum(life.nbytes for life in there[:TOP])
    lines.append(f"  {rest:>14} bytes  in {max(0, len(there) - TOP)} smaller tensors and the staging of copies")
    if op.workspace:
        lines.append(f"  {op.workspace:>14} bytes  workspace  of {op.name} itself")
    lines.append(f"Give budget={forecast.peak}, a smaller batch, or fewer bytes in what is listed.")
    return "\n".join(lines)
