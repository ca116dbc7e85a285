"""What was fetched for one visit stays until the next, where there is room for it: a fetch that nobody has to make.

    w is fetched for mm_3 and again for mm_90, 10 MB; no line between needs more than 60 of 72 MB   ->   only for mm_3

Those that wait the shortest come first: they take the least room for what they spare the link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir.decisions import Plan, Reload, Stream
from ..ir.ops import reload_name
from ..simulate.forecast import Forecast


@dataclass(frozen=True, order=True, slots=True)
class IdleInterval:
    """From behind the last use of one copy, at line `first`, to before line `last`, which fetches the next one."""

    us: float
    first: int
    last: int
    nbytes: int
    place: int  # of the decision that fetches it


def keep_between_uses(plan: Plan, forecast: Forecast, room: int) -> Plan:
    """The plan, whose forecast is given, without the fetches of what may stay instead with so many bytes there."""
    there, spared = forecast.total.copy(), set[int]()
    for rest in sorted(_rests(plan, forecast)):
        lines = slice(rest.first, rest.last)
        if int(there[lines].max(initial=0)) + rest.nbytes <= room:
            there[lines] += rest.nbytes
            spared.add(rest.place)
    return tuple(said for place, said in enumerate(plan) if place not in spared)


def _rests(plan: Plan, forecast: Forecast) -> Iterator[IdleInterval]:
    """Between two fetches of what lives far."""
    far = {said.value for said in plan if isinstance(said, Stream)}
    gone = {life.storage: life.last for life in forecast.lifetimes}
    index = {op.name: line for line, op in enumerate(forecast.trace.ops)}
    count: dict[str, int] = {}
    for place, said in enumerate(plan):
        if isinstance(said, Reload) and said.value in far:
            number = count[said.value] = count.get(said.value, 0) + 1
            if number > 1:
                first, name = gone[reload_name(said.value, number - 1)] + 1, reload_name(said.value, number)
                last, nbytes = index[name], forecast.trace.op[name].nbytes
                yield IdleInterval(
                    forecast.begins[last] - forecast.begins[min(first, last)], first, last, nbytes, place
                )
