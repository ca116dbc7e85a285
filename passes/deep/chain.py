"""Recompute a chain section by section, each section as often as the budget requires.

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
from dataclasses import dataclass, replace

from ..analysis.chain_sections import Sections
from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Plan, apply
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..schedule.recompute_order import RecomputeOrder
from ..simulate.forecast import predict
from .chain_dp import ChainDP, ChainStep, Needs

MOST = 160  # sections
SLOTS = 256
TRIES = 8
SLACK = 8  # a table reaches this part beyond the budget: what is forecast is less than what the slots say
STRIDE = 3  # slots between two tries near the floor


def rerun_chain(trace: Trace, machine: Machine, until: float = math.inf) -> Plan:
    """Return the fastest plan that fits, or the one of the lowest peak; no decisions if the step is no chain.

    At `until`, as `time.monotonic` has it, it ends with what was found.
    """
    captured = predict(trace, machine)
    sections = Sections(ReuseGaps(trace), MOST)
    if captured.peak <= machine.budget or sections.count < 3:
        return ()
    needs = Needs(sections)
    tried = [ChainTry((), captured.peak, captured.us)]
    if needs.floor <= machine.budget and time.monotonic() < until:
        tried += _towards(machine, ChainDP(needs, _beyond(machine.budget, sections), SLOTS, until))
    if not any(each.peak <= machine.budget for each in tried) and time.monotonic() < until:
        # These do not depend on the budget: so the lowest of their peaks is a budget that can be met.
        tried = tried[:1] + _lowest(machine, needs, until)
    fits = [each for each in tried if each.peak <= machine.budget]
    best = min(fits, key=lambda each: (each.us, each.peak)) if fits else min(tried, key=lambda each: each.peak)
    return best.plan


@dataclass(frozen=True, slots=True)
class ChainTry:
    """A plan with its forecast."""

    plan: Plan
    peak: int
    us: float


def _beyond(nbytes: int, sections: Sections) -> int:
    return nbytes + (nbytes - int(sections.base.min())) // SLACK


def _towards(machine: Machine, rotor: ChainDP) -> list[ChainTry]:
    """Return plans of as many slots as bring the peak close to the budget."""
    found: list[ChainTry] = []
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


def _lowest(machine: Machine, needs: Needs, until: float) -> list[ChainTry]:
    """Return plans of few slots, and those for the lowest of their peaks, as long as that falls.

    The fewest slots need not give the lowest peak.
    """
    rotor = ChainDP(needs, _beyond(needs.floor, needs.sections), SLOTS, until)
    places = range(rotor.least, min(rotor.least + TRIES * STRIDE, rotor.size), STRIDE)
    found = [_try(machine, rotor, slots) for slots in places if time.monotonic() < until]
    lowest = math.inf
    while found and (peak := min(each.peak for each in found)) < lowest and time.monotonic() < until:
        lowest = peak
        found += _towards(replace(machine, budget=peak), ChainDP(needs, _beyond(peak, needs.sections), SLOTS, until))
    return found


def _try(machine: Machine, rotor: ChainDP, slots: int) -> ChainTry:
    plan = _Writer(rotor.sections).plan(rotor.undo(slots))
    forecast = predict(apply(rotor.sections.gaps.trace, plan), machine)
    return ChainTry(plan, forecast.peak, forecast.us)


class _Writer:
    """Writes the recomputations of a chain, section by section in backward."""

    def __init__(self, sections: Sections) -> None:
        self.sections = sections
        self.gaps = sections.gaps
        self.reruns = RecomputeOrder(sections.gaps, frozenset(sections.producer))
        self.is_past_first = False

    def plan(self, undone: Iterable[ChainStep]) -> Plan:
        for undo in undone:
            self._undo(undo)
        return tuple(self.reruns.decisions)

    def _undo(self, undo: ChainStep) -> None:
        """Recompute what is held through backward of a section, and before each op what else it reads."""
        held = self._held(undo)
        ops = self.sections.backward[undo.section]
        wanted = held.union(*(self.sections.reads[i] for i in ops))
        self.reruns.drop(held if self.is_past_first else wanted)  # the step itself has run the last section
        self.is_past_first = True
        roots = [self.reruns.whole_value(storage) for storage in wanted - self.sections.needed[undo.section]]
        self.reruns.recompute(roots, ops[0], wanted)
        self.reruns.drop(wanted)
        for i in ops:
            self.reruns.recompute(self.gaps.reads.get(i, ()), i, wanted)

    def _held(self, undo: ChainStep) -> frozenset[str]:
        named = {"crossing": self.sections.crossing, "kept": self.sections.kept}
        return frozenset(storage for kind, j in undo.held for storage in named[kind][j])
