"""Recompute before a gradient has come, as far as the budget has room: a stage waits for it anyway.

    d = tangent()                            d = tangent()
    g = relu_backward(d, c)                  b__1 = relu(a)
    b__1 = relu(a)                 ->        g = relu_backward(d, c)
    h = mm_backward(g, b__1)                 h = mm_backward(g, b__1)

What comes before the first op that reads a gradient needs none.  Source: FairScale's AsyncPipe (146f160).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..ir.decisions import Plan, Recompute
from ..ir.trace import Trace
from ..simulate.plan_result import PlanResult

ForecastPlan = Callable[[Plan], PlanResult]


def recompute_early(choice: PlanResult, budget: int, forecast: ForecastPlan) -> PlanResult:
    """Return the plan with as many of its recomputations before the first read of a gradient as the budget allows.

    Args:
        forecast: gives a plan of the same trace with its forecast.
    """
    trace = choice.captured.trace
    first = first_gradient_read(trace)
    if first is None:
        return choice
    places = _late_recomputations(trace, choice.plan, first)
    low, best = 0, choice
    high = len(places)
    while low < high:
        middle = (low + high + 1) // 2
        moved = forecast(_with_moved(choice.plan, places[:middle], first))
        if moved.forecast.peak <= budget:
            low, best = middle, moved
        else:
            high = middle - 1
    return best


def first_gradient_read(trace: Trace) -> str | None:
    """Return the first op that reads a gradient that is received; None if there is none."""
    tangents = {op.name for op in trace.ops if op.fn == "tangent"}
    return next((op.name for op in trace.ops if not op.is_input and not tangents.isdisjoint(op.reads)), None)


def _late_recomputations(trace: Trace, plan: Plan, first: str) -> list[int]:
    """Return the places in the plan of what is recomputed behind the first read, the earliest in the step first.

    They end before a value that is recomputed twice, which what follows may read.
    """
    line = {op.name: i for i, op in enumerate(trace.ops)}
    times = Counter(each.value for each in plan if isinstance(each, Recompute))
    late = [
        (line[each.before], i)
        for i, each in enumerate(plan)
        if isinstance(each, Recompute) and line[each.before] > line[first]
    ]
    places = [i for _, i in sorted(late)]
    twice = next((n for n, i in enumerate(places) if times[plan[i].value] > 1), len(places))
    return places[:twice]


def _with_moved(plan: Plan, places: list[int], first: str) -> Plan:
    moved = set(places)
    early = [Recompute(plan[i].value, first) for i in places]
    return (*(each for i, each in enumerate(plan) if i not in moved), *early)
