"""Undo a chain slice by slice, and run each slice as often as the budget asks for.

    x -> [a] -> [b] -> [c] -> [d]      kept: x, b
    backward of d                      c again, from b
    backward of c                      b dropped
    backward of b                      a again, from x

Where the greedy planner makes a value again from what is kept throughout, here what it is made from is itself made
again, kept for a while and dropped.  The plan of a chain of equal ops is that of revolve.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from .decisions import Decision, Plan, Recompute, apply
from .forecast import predict
from .gaps import Gaps
from .machine import Machine
from .rotor import Needs, Rotor, Undo
from .slices import Slices
from .trace import Trace

MOST = 160  # slices
SLOTS = 256
TRIES = 8
SLACK = 8  # a table reaches this part beyond the budget: what is forecast is less than what the slots say
STRIDE = 3  # slots between two tries near the floor


def rerun_slices(trace: Trace, machine: Machine, until: float = math.inf) -> Plan:
    """The quickest plan found that fits the budget; that of the lowest peak, if none does; nothing, if no chain.

    At `until`, as `time.monotonic` has it, it ends with what was found.
    """
    captured = predict(trace, machine)
    slices = Slices(Gaps(trace), MOST)
    if captured.peak <= machine.budget or slices.count < 3:
        return ()
    needs = Needs(slices)
    tried = [Try((), captured.peak, captured.us)]
    if needs.floor <= machine.budget and time.monotonic() < until:
        tried += _towards(machine, Rotor(needs, _beyond(machine.budget, slices), SLOTS, until))
    if not any(each.peak <= machine.budget for each in tried) and time.monotonic() < until:
        # These do not depend on the budget: so the lowest of their peaks is a budget that can be met.
        tried = tried[:1] + list(_lowest(machine, Rotor(needs, _beyond(needs.floor, slices), SLOTS, until)))
    fits = [each for each in tried if each.peak <= machine.budget]
    best = min(fits, key=lambda each: (each.us, each.peak)) if fits else min(tried, key=lambda each: each.peak)
    return best.plan


@dataclass(frozen=True, slots=True)
class Try:
    """A plan, and what the simulator says of it."""

    plan: Plan
    peak: int
    us: float


def _beyond(nbytes: int, slices: Slices) -> int:
    return nbytes + (nbytes - int(slices.base.min())) // SLACK


def _towards(machine: Machine, rotor: Rotor) -> list[Try]:
    """Plans of as many slots as bring the peak next to the budget."""
    found: list[Try] = []
    low, high = rotor.least - 1, rotor.size
    slots = max(rotor.least, rotor.place(machine.budget))
    while low < slots < high and len(found) < TRIES and time.monotonic() < rotor.until:
        found.append(_try(machine, rotor, slots))
        room = machine.budget - found[-1].peak
        if room >= 0:
            low = slots
        else:
            high = slots
        slots = min(max(slots + room // rotor.unit, low + 1), high - 1)
    return found


def _lowest(machine: Machine, rotor: Rotor) -> list[Try]:
    """Plans of the fewest slots.  The fewest of all need not have the lowest peak."""
    places = range(rotor.least, min(rotor.least + TRIES * STRIDE, rotor.size), STRIDE)
    return [_try(machine, rotor, slots) for slots in places if time.monotonic() < rotor.until]


def _try(machine: Machine, rotor: Rotor, slots: int) -> Try:
    plan = _Writer(rotor.slices).plan(rotor.undo(slots))
    forecast = predict(apply(rotor.slices.gaps.trace, plan), machine)
    return Try(plan, forecast.peak, forecast.us)


class _Writer:
    """Walks backward; `there` are the forward values that can be read without making anything again."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices
        self.gaps = slices.gaps
        self.there = set(self.gaps.held)
        self.begun = False
        self.decisions: list[Decision] = []

    def plan(self, undone: Iterable[Undo]) -> Plan:
        for undo in undone:
            self._undo(undo)
        return tuple(self.decisions)

    def _undo(self, undo: Undo) -> None:
        """What stands before backward of a slice: what is held; and before each of its ops what that reads besides."""
        held = self._held(undo)
        ops = self.slices.backward[undo.slice]
        wanted = held.union(*(self.slices.reads[i] for i in ops))
        self._drop(held if self.begun else wanted)  # the step itself has run the last slice
        self.begun = True
        self._make([self._root(storage) for storage in wanted - self.slices.needed[undo.slice]], ops[0], wanted)
        self._drop(wanted)
        for i in ops:
            self._make(self.gaps.reads.get(i, ()), i, wanted)

    def _held(self, undo: Undo) -> set[str]:
        named = {"crossing": self.slices.crossing, "kept": self.slices.kept}
        return {storage for kind, j in undo.held for storage in named[kind][j]}

    def _drop(self, held: set[str]) -> None:
        """Forget the values whose bytes are not held; what may not be made again stays."""
        made, storages = self.slices.made, self.gaps.held
        self.there = {value for value in self.there if all(s in held or s not in made for s in storages[value])}

    def _root(self, storage: str) -> str:
        """The value that is there if `storage` is: what its op makes, or the part of that which is `storage` alone."""
        maker = self.gaps.maker[storage]
        if self.gaps.held[maker] == (storage,):
            return maker
        return next((part for part in self.gaps.parts.get(maker, ()) if self.gaps.held[part] == (storage,)), maker)

    def _make(self, values: Iterable[str], index: int, wanted: set[str]) -> None:
        """Make the values be there for the op at `index`, and before them what they are made from."""
        todo, missing = list(values), set[str]()
        while todo:
            value = todo.pop()
            if value not in self.there and value not in missing:
                missing.add(value)
                todo += [read for read in self.gaps.trace.op[value].reads if read in self.gaps.held]
                # A part that is wanted is taken out at once: all the parts lie there until the last is.
                todo += [part for part in self.gaps.parts.get(value, ()) if wanted.issuperset(self.gaps.held[part])]
        place = self.gaps.trace.ops[index].name
        self.decisions += [Recompute(value, place) for value in sorted(missing, key=self.gaps.index.__getitem__)]
        self.there |= missing
