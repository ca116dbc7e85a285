"""The same decisions with copies that begin later or end sooner, where the step is over the budget meanwhile.

    86.2 MB at mm_5, 86.0 MB allowed
        a, 10 MB, is on its way back for mm_9          ->   it begins behind mm_5
        g, 10 MB, is on its way out and held to mm_7   ->   compute waits for it before mm_5

What runs again, leaves or lives far stays as it is: bytes that are under way are spared, and time is spent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .decisions import Decision, Offload, Plan, Reload, apply
from .forecast import Copy, Forecast, predict
from .gaps import Gaps
from .machine import Machine

ROUNDS = 6
BEHIND = ("memgraph.narrow.default", "memgraph.offload.default", "memgraph.free.default")  # stand behind an op


@dataclass(frozen=True, slots=True)
class Trip:
    """A copy, the index of its decision, its bytes, and the first and the last line that hold them for its sake."""

    copy: Copy
    place: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the step that is over the budget, and the captured ops just before it and just behind it."""

    index: int
    before: int
    behind: int


def in_time(gaps: Gaps, machine: Machine, plan: Plan, forecast: Forecast) -> tuple[Plan, Forecast]:
    """The plan with its copies timed so that the step fits, or nearly does; and its forecast."""
    for _ in range(ROUNDS):
        moved = _moved(gaps, machine, plan, forecast)
        if moved == plan:
            break
        plan, forecast = moved, predict(apply(gaps.trace, moved), machine)
    return plan, forecast


def _moved(gaps: Gaps, machine: Machine, plan: Plan, forecast: Forecast) -> Plan:
    """The plan with other times for copies that are under way where the step is over the budget."""
    decisions, total, trips = list(plan), forecast.total.copy(), tuple(_trips(plan, forecast))
    for line in _lines(gaps, forecast, machine.budget):
        excess = int(total[line.index]) - machine.budget
        there = [trip for trip in trips if trip.first <= line.index <= trip.last]
        for trip in sorted(there, key=lambda trip: _us(forecast, trip, line.index)):
            new = _aside(gaps, decisions[trip.place], line)
            if excess > 0 and new != decisions[trip.place]:
                back = isinstance(new, Reload)
                decisions[trip.place] = new
                excess -= trip.nbytes
                total[slice(trip.first, line.index + 1) if back else slice(line.index, trip.last + 1)] -= trip.nbytes
    return tuple(decisions)


def _trips(plan: Plan, forecast: Forecast) -> Iterator[Trip]:
    """The copies of a planned step."""
    index = {op.name: i for i, op in enumerate(forecast.trace.ops)}
    copies = {copy.value: copy for copy in forecast.copies}
    count: dict[str, int] = {}
    for place, decision in enumerate(plan):
        value = decision.value
        if isinstance(decision, Offload):
            name, last = f"{value}__out", f"{value}__free"
            sent = forecast.trace.op[forecast.trace.op[name].reads[0]]
            nbytes = forecast.trace.nbytes[sent.holds[0]]
        elif isinstance(decision, Reload):
            count[value] = count.get(value, 0) + 1
            name, last = f"{value}__in_{count[value]}", f"{value}__back_{count[value]}"
            nbytes = forecast.trace.op[name].nbytes
        else:
            continue
        yield Trip(copies[name], place, nbytes, index[name], index[last])


def _lines(gaps: Gaps, forecast: Forecast, budget: int) -> list[Line]:
    """The lines that are over the budget, the worst first."""
    found, last = [], -1
    for index, op in enumerate(forecast.trace.ops):
        captured = gaps.index.get(op.name)
        last = last if captured is None else captured
        if forecast.total[index] > budget:
            at = captured is not None
            stands_before = not at and op.fn not in BEHIND
            found.append(Line(index, last if stands_before else last - 1, last + 1 + stands_before))
    return sorted(found, key=lambda line: -int(forecast.total[line.index]))


def _us(forecast: Forecast, trip: Trip, index: int) -> tuple[float, float]:
    """About how long compute waits if a copy is not under way at a line; of two, the one that is wanted later."""
    length = trip.copy.end - trip.copy.begin
    if trip.copy.queue == "out":
        return max(0.0, trip.copy.end - forecast.begins[index]), trip.copy.end
    wanted = forecast.begins[trip.last]
    return max(0.0, forecast.begins[index] + length - wanted), -wanted


def _aside(gaps: Gaps, decision: Decision, line: Line) -> Decision:
    """The decision with a copy that has ended before a line, or begins behind it; itself, if it can't."""
    ops, index = gaps.trace.ops, gaps.index
    if isinstance(decision, Offload):
        free = min(index[decision.free], max(line.before, index[decision.out]))
        return replace(decision, free=ops[free].name)
    if not isinstance(decision, Reload):
        return decision
    back = max(index[decision.back], min(line.behind, index[decision.use]))
    return replace(decision, back=ops[back].name)
