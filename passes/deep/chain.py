"""Recompute a chain section by section, each section as often as the budget requires.

    x -> [a] -> [b] -> [c] -> [d]      kept: x, b
    backward of d                      c again, from b
    backward of c                      b dropped
    backward of b                      a again, from x

Where the greedy planner makes a value again from what is kept throughout, here what it is made from is itself made
again, kept for a while and dropped.  The plan of a chain of equal ops is that of revolve.

Decide how often to run each section of a chain, for the least time within a number of bytes.

    undo(s, t):  run s and keep what its backward reads;  undo(s + 1, t);  backward of s
    or           run s ... k - 1 and keep only the storages at the beginning of k;  undo(k, t);  undo(s, k - 1)
    or           run s ... t and keep only what backward of t reads;  backward of t;  undo(s, t - 1)

A dynamic programme over slots of bytes, in the manner of Beaumont et al., "Optimal checkpointing for heterogeneous
chains".  The bytes at the beginning of s are not counted within undo(s, t).  The first run, of segments that reach the
end of the chain, is that of the step itself, and costs nothing.

Order the ops to recompute before the ops of backward, as often as needed.

drop({x}); recompute((c,), index of g)   ->   Recompute("b", before="g"), Recompute("c", before="g")    c of b, b of x
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..analysis.chain_sections import Sections
from ..analysis.reuse_gaps import ReuseGaps
from ..ir.arrays import Ints
from ..ir.decisions import Plan, Recompute, apply
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..simulate.forecast import predict

MOST = 160  # sections
SLOTS = 256
TRIES = 8
SLACK = 8  # a table reaches this part beyond the budget: what is forecast is less than what the slots say
STRIDE = 3  # slots between two tries near the floor
Table = npt.NDArray[np.float32]
HeldValues = tuple[tuple[str, int], ...]


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


@dataclass(frozen=True, slots=True)
class ChainStep:
    """Backward of a section, and the storages on the device when it begins.

    `held` names sections: ("crossing", j) for what lies at the beginning of j, ("kept", j) for what j keeps.
    """

    section: int
    held: HeldValues


@dataclass(frozen=True, eq=False)
class Needs:
    """The exact bytes of each step of a chain: those that no section moves, and those beside `held`."""

    sections: Sections

    @cached_property
    def kept_peak(self) -> Ints:
        return self.sections.own_peak(self.sections.kept)

    @cached_property
    def needed_peak(self) -> Ints:
        return self.sections.own_peak(self.sections.needed)

    def leaf(self, s: int) -> Ints:
        """Run sections s ... t for backward of t alone, and undo t: for each t from s on."""
        x = self.sections
        before = np.maximum.accumulate(np.append(0, x.forward_peak[s, s:-1]))
        run = np.maximum(before, x.added_nbytes[s, s:-1] + self.needed_peak[s:])
        return np.maximum(x.base[s:] + run, x.backward_peak[s, s:])

    def keep(self, s: int) -> Ints:
        """Run section s and keep what backward reads, before undoing t: for each t behind s.  Undo it afterwards."""
        x = self.sections
        return np.maximum(x.base[s + 1 :] + self.kept_peak[s], x.backward_peak[s, s])

    def run(self, s: int) -> Ints:
        """[k, t] with both counted from s + 1: run sections s ... k - 1 before undoing t."""
        x = self.sections
        return np.maximum.accumulate(x.forward_peak[s, s:-1])[:, None] + x.base[None, s + 1 :]

    @cached_property
    def floor(self) -> int:
        """Return the fewest bytes in which backward of the chain can run."""
        x, n = self.sections, self.sections.count
        least = np.zeros((n, n), np.int64)
        for s in range(n - 1, -1, -1):
            row, leaf, run = least[s], self.leaf(s), self.run(s)
            row[s] = leaf[0]
            if s + 1 < n:
                row[s + 1 :] = np.maximum(self.keep(s), x.kept_nbytes[s] + least[s + 1, s + 1 :])
            for k in range(s + 1, n):
                most = np.maximum(run[k - s - 1, k - s - 1 :], x.added_nbytes[s, k] + least[k, k:])
                row[k:] = np.minimum(row[k:], np.maximum(most, row[k - 1]))
                row[k] = min(row[k], max(leaf[k - s], row[k - 1]))
        return int(least[0, -1])


class ChainDP:
    """The least time of backward of each segment in each number of slots; `slots` of them make `top` bytes.

    A table that is not full at `until`, as `time.monotonic` has it, says of the whole chain that it can't be undone.
    """

    def __init__(self, needs: Needs, top: int, slots: int, until: float = math.inf) -> None:
        self.until = until
        self.sections = x = needs.sections
        self.needs = needs
        self.origin = int(x.base.min())  # is there throughout, and takes no slots
        self.unit = max(1, -(-(top - self.origin) // slots))
        self.size = slots + 1
        # Rounded up on the whole, not one by one: of many sections that are kept, half a slot each would be lost.
        self.kept = np.diff(self._slots(np.cumsum(np.append(0, x.kept_nbytes))))
        self.added = self._slots(x.added_nbytes)
        self.none_us = np.cumsum(np.append(0.0, x.us(x.crossing[1:])))
        self.keep_us = x.us(x.kept)
        self.leaf_us = x.us(x.needed)
        self.us = self._table()

    def undo(self, slots: int) -> tuple[ChainStep, ...]:
        """Return the backward of each section, in order; nothing if that takes more slots."""
        if not np.isfinite(self.us[0, -1, slots]):
            return ()
        return tuple(self._walk(0, self.sections.count - 1, slots, ()))

    def place(self, nbytes: int) -> int:
        """Return the number of slots for so many bytes, at most all."""
        return min(max(0, (nbytes - self.origin) // self.unit), self.size - 1)

    @property
    def least(self) -> int:
        """Return the fewest slots in which backward of the chain can run; all of them if it cannot."""
        can = np.flatnonzero(np.isfinite(self.us[0, -1]))
        return int(can[0]) if len(can) else self.size - 1

    def _slots(self, nbytes: Ints) -> Ints:
        return -(-nbytes // self.unit)

    def _from(self, nbytes: Ints) -> Ints:
        """Return the number of slots from which on so many bytes fit."""
        return np.clip(self._slots(nbytes - self.origin), 0, self.size)

    def _table(self) -> Table:
        n = self.sections.count
        table = np.full((n, n, self.size), np.inf, np.float32)
        first = np.full((n, n), self.size)  # the fewest slots in which each segment can be undone
        for s in range(n - 1, -1, -1):
            if time.monotonic() >= self.until:
                break
            self._fill(table, first, s)
            finite = np.isfinite(table[s])
            first[s] = np.where(finite.any(axis=1), finite.argmax(axis=1), self.size)
        return table

    def _fill(self, table: Table, first: Ints, s: int) -> None:
        """Fill the table for segments that begin with section s, given those that begin later."""
        n, kept = self.sections.count, int(self.kept[s])
        leaf = self._from(self.needs.leaf(s))
        table[s, s, leaf[0] :] = self.leaf_us[s] if s + 1 < n else 0.0
        if s + 1 < n and kept < self.size:
            table[s, s + 1 :, kept:] = table[s + 1, s + 1 :, : self.size - kept]
            table[s, s + 1 : n - 1] += np.float32(self.keep_us[s])
            table[s, s + 1 :][np.arange(self.size) < self._from(self.needs.keep(s))[:, None]] = np.inf
        run = self._from(self.needs.run(s))
        for k in range(s + 1, n):
            added = int(self.added[s, k])
            if added < self.size:
                us = np.float32(self.none_us[k] - self.none_us[s])
                found = table[k, k:, : self.size - added] + (table[s, k - 1, added:] + us)
                found[-1] -= us
                need = run[k - s - 1, k - s - 1 :] - added
                for row in np.flatnonzero(need > first[k, k:]):
                    found[row, : need[row]] = np.inf
                old = table[s, k:, added:]
                np.minimum(old, found, out=old)
            us = np.float32(self.none_us[k] - self.none_us[s] + self.leaf_us[k]) if k + 1 < n else np.float32(0.0)
            alone = table[s, k - 1, leaf[k - s] :] + us
            np.minimum(table[s, k, leaf[k - s] :], alone, out=table[s, k, leaf[k - s] :])

    def _walk(self, s: int, t: int, slots: int, held: HeldValues) -> Iterator[ChainStep]:
        k = self._choice(s, t, slots)
        if k > t:
            yield ChainStep(t, held)
            if t > s:
                yield from self._walk(s, t - 1, slots, held)
        elif k == s:
            kept = (*held, ("kept", s))
            yield from self._walk(s + 1, t, slots - int(self.kept[s]), kept)
            yield ChainStep(s, kept)
        else:
            yield from self._walk(k, t, slots - int(self.added[s, k]), (*held, ("crossing", k)))
            yield from self._walk(s, k - 1, slots, held)

    def _choice(self, s: int, t: int, slots: int) -> int:
        """Return the section up to which to run: t + 1 for backward of t only, s to keep what backward of s reads."""
        if s == t:
            return t + 1
        paid = t + 1 == self.sections.count
        best, least = t + 1, np.inf
        if slots >= self._from(self.needs.leaf(s))[t - s]:
            least = self.us[s, t - 1, slots]
            least += 0.0 if paid else self.none_us[t] - self.none_us[s] + self.leaf_us[t]
        if slots >= max(self.kept[s], self._from(self.needs.keep(s))[t - s - 1]):
            us = self.us[s + 1, t, slots - self.kept[s]] + (0.0 if paid else self.keep_us[s])
            if us < least:
                best, least = s, us
        run = self._from(self.needs.run(s)[:, t - s - 1])
        for k in range(s + 1, t + 1):
            if slots >= max(self.added[s, k], run[k - s - 1]):
                us = self.us[k, t, slots - self.added[s, k]] + self.us[s, k - 1, slots]
                us += 0.0 if paid else self.none_us[k] - self.none_us[s]
                if us < least:
                    best, least = k, us
        return best


class RecomputeOrder:
    """Walks backward; `available` are the forward values that can be read without a recompute."""

    def __init__(self, gaps: ReuseGaps, recomputable: frozenset[str]) -> None:
        self.gaps = gaps
        self.recomputable = recomputable
        self.available = set(gaps.holds)
        self.decisions: list[Recompute] = []

    def drop(self, held: frozenset[str]) -> None:
        """Free the values of storages that are not `held`, but for those that may not be recomputed."""
        storages = self.gaps.holds
        self.available = {
            value for value in self.available if all(s in held or s not in self.recomputable for s in storages[value])
        }

    def whole_value(self, storage: str) -> str:
        """Return the value that holds `storage` alone: the result of its op, or an item of that."""
        producer = self.gaps.producer[storage]
        if self.gaps.holds[producer] == (storage,):
            return producer
        return next(
            (item for item in self.gaps.getitems.get(producer, ()) if self.gaps.holds[item] == (storage,)), producer
        )

    def recompute(self, values: Iterable[str], index: int, wanted: frozenset[str]) -> None:
        """Recompute values for the op at `index`, and before them what they need."""
        todo, missing = list(values), set[str]()
        while todo:
            value = todo.pop()
            if value not in self.available and value not in missing:
                missing.add(value)
                todo += [read for read in self.gaps.trace.op[value].reads if read in self.gaps.holds]
                # Wanted items are taken out at once: the whole tuple is live until the last is.
                todo += [item for item in self.gaps.getitems.get(value, ()) if wanted.issuperset(self.gaps.holds[item])]
        place = self.gaps.trace.ops[index].name
        self.decisions += [Recompute(value, place) for value in sorted(missing, key=self.gaps.trace.index.__getitem__)]
        self.available |= missing
