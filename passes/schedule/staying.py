"""Keep a reloaded value until its next use, where the budget has room: that saves a reload.

    w, 10 MB, is reloaded for mm_3 and for mm_90; no op between needs more than 60 of 72 MB   ->   only for mm_3

The shortest intervals come first: they take the least memory for what they save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir.decisions import Plan, Reload, Stream
from ..ir.ops import reload_name
from ..simulate.forecast import Forecast


@dataclass(frozen=True, order=True, slots=True)
class IdleInterval:
    """From the line after the last use of a reloaded copy, `first`, to the next reload, at `last`."""

    us: float
    first: int
    last: int
    nbytes: int
    place: int  # index of the decision of that reload


def keep_between_uses(plan: Plan, forecast: Forecast, room: int) -> Plan:
    """Return the plan without reloads of values that can stay within `room` bytes; `forecast` is the plan's."""
    nbytes, saved = forecast.total.copy(), set[int]()
    for interval in sorted(_idle_intervals(plan, forecast)):
        lines = slice(interval.first, interval.last)
        if int(nbytes[lines].max(initial=0)) + interval.nbytes <= room:
            nbytes[lines] += interval.nbytes
            saved.add(interval.place)
    return tuple(decision for place, decision in enumerate(plan) if place not in saved)


def _idle_intervals(plan: Plan, forecast: Forecast) -> Iterator[IdleInterval]:
    streamed = {decision.value for decision in plan if isinstance(decision, Stream)}
    last_line = {life.storage: life.last for life in forecast.lifetimes}
    index = forecast.trace.index
    count: dict[str, int] = {}
    for place, decision in enumerate(plan):
        if isinstance(decision, Reload) and (value := decision.value) in streamed:
            number = count[value] = count.get(value, 0) + 1
            if number > 1:
                first, name = last_line[reload_name(value, number - 1)] + 1, reload_name(value, number)
                last, nbytes = index[name], forecast.trace.op[name].nbytes
                yield IdleInterval(
                    forecast.begins[last] - forecast.begins[min(first, last)], first, last, nbytes, place
                )
