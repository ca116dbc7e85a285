"""Lower the peak step by step: at the peak, change the placements that cost the least time per byte.

    18.9 MB at mm_7   recompute gelu_3 (4.2 MB, 310 us), offload add_2 (2.1 MB)
    14.1 MB at mm_9   ...

The way down does not depend on the budget.  Its candidates whose peak is below that of all before form a falling
sequence, and a budget takes the first that fits.  So the peak never rises when the budget falls, and the last candidate
has the smallest budget.  No storage goes back to an earlier placement.  On equal layers the plan is within 0.5 % of
the best, on others it is worse.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Plan
from ..ir.liveness import Lifetime
from ..ir.machine import SMALLEST_STREAMED, Machine
from ..ir.trace import Trace
from ..schedule.candidate import Candidate, make_candidate
from ..schedule.schedule import CAST, OFFLOADED, OVERLAPPED, STATE_OFFLOADED, Placement, offloaded_nbytes, placement_of

GRAIN = 0.04  # of the movable bytes at the first peak: what is moved between two simulations
# Ops that are simulated in fine steps: some hundred milliseconds.  In a loop over time, what is recomputed for each use
# needs all of the loop before it: there a candidate grows to 40 times the step, and its plan is of no use.
FINE = 20_000
COARSE = 0.12  # the same once the work for fine steps is used up
LAST = 3  # times the work for fine steps is simulated in all
HALVED = 16  # the change to a neighbour that is known is found to this part of all between the two
FEWEST = 4  # candidates that are simulated in any case
COPIED = (*OFFLOADED, *STATE_OFFLOADED)
BLOCKING_STATE = {Placement.OFFLOAD: Placement.OFFLOAD_BLOCKING, Placement.STREAM: Placement.OFFLOAD_BLOCKING}
BLOCKING = {Placement.OFFLOAD: Placement.OFFLOAD_BLOCKING, Placement.CAST_OFFLOAD: Placement.CAST_OFFLOAD_BLOCKING}
MEMORY_RATE = 4000.0  # bytes per microsecond at which compute's own memory traffic is slowed by a copy


def greedy_plan(trace: Trace, machine: Machine, until: float = math.inf, fine: float | None = None) -> Plan:
    """Return the plan of the first candidate on the way down that fits the budget; of the lowest, if none does.

    It ends at `until`, as `time.monotonic` has it.  Once `fine` ops were simulated, `FINE` by default, its steps are
    coarse and few.
    """
    gaps, fine = ReuseGaps(trace), FINE if fine is None else fine
    ops = LAST * max(fine, FEWEST * len(trace.ops))
    return greedy_from(gaps, machine, make_candidate(gaps, machine, {}), until, ops, fine).plan


def greedy_thorough(trace: Trace, machine: Machine, until: float = math.inf) -> Plan:
    """The same with fine steps to the end, however many ops they simulate."""
    return greedy_plan(trace, machine, until, math.inf)


def greedy_from(
    gaps: ReuseGaps,
    machine: Machine,
    lowest: Candidate,
    until: float = math.inf,
    ops: float = math.inf,
    fine: float = math.inf,
) -> Candidate:
    """Return the first candidate that fits on the way down from one that does not; the lowest, if none does.

    It ends at `until`, or when so many `ops` were simulated.
    """
    for before, after in _way_down(gaps, machine, lowest, until, ops, fine):
        if after.peak <= machine.budget:
            between = _halfway if len(gaps.trace.ops) * len(after.placements) > fine else _first_between
            return between(gaps, machine, before, after, until)
        lowest = after
    return lowest


def greedy_plan_no_offload(trace: Trace, machine: Machine, until: float = math.inf, fine: float | None = None) -> Plan:
    """The same without offload."""
    return greedy_plan(trace, machine.without_tier, until, fine) if machine.link.out else ()


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """A new placement for a storage: the bytes that it takes from the peak, and its cost.

    Attributes:
        us: the time that it adds to the step.
        tier_nbytes: the bytes that it takes of the tier.
        is_staged: True if its copies take staging: an update reads offloaded states in windows instead.
    """

    storage: str
    placement: Placement
    nbytes: int
    us: float
    tier_nbytes: int = 0
    is_staged: bool = False

    @property
    def price(self) -> float:
        return self.us / self.nbytes


def _way_down(
    gaps: ReuseGaps, machine: Machine, start: Candidate, until: float, ops: float, fine: float
) -> Iterator[tuple[Candidate, Candidate]]:
    """Yield pairs of neighbouring candidates with falling peaks; changes that do not lower it join the next ones."""
    known = {*gaps.producer, *gaps.streamable.values}
    forecast = start.forecast
    movable = sum(life.nbytes for life in forecast.live_at(forecast.peak_index) if life.storage in known)
    candidate = lowest = start
    while ops > 0 and time.monotonic() < until and (changes := _changes(gaps, machine, candidate)):
        placements = candidate.placements
        tier = {s: offloaded_nbytes(gaps, machine, s, each) for s, each in placements.items() if each in COPIED}
        room = machine.link.capacity - sum(tier.values())
        nbytes = int(movable * (GRAIN if fine > 0 else COARSE))
        if not candidate.forecast.staging:
            changes = _worth_staging(changes, machine.link.staging)
        candidate = make_candidate(gaps, machine, placements | _cheapest(changes, nbytes, tier, room))
        simulated = len(candidate.forecast.trace.ops)
        ops, fine = ops - simulated, fine - simulated
        if candidate.peak < lowest.peak:
            yield lowest, candidate
            lowest = candidate
    if candidate.peak == lowest.peak:
        yield lowest, candidate  # without movable storages at its peak it shows best what needs the bytes


def _worth_staging(changes: list[PlacementChange], staging: int) -> list[PlacementChange]:
    """Leave out changes that need staging, if all of them free no more than it takes, and others are left."""
    unstaged = [change for change in changes if not change.is_staged]
    staged = {change.storage: change.nbytes for change in changes if change.is_staged}
    return unstaged if unstaged and sum(staged.values()) <= staging else changes


def _cheapest(changes: list[PlacementChange], nbytes: int, tier: Container[str], room: int) -> dict[str, Placement]:
    """Return the cheapest changes that free `nbytes`, at least one; storages that are not in `tier` need `room`."""
    placements: dict[str, Placement] = {}
    for change in sorted(changes, key=lambda change: (change.price, change.storage)):
        if placements and nbytes <= 0:
            break
        tier_nbytes = change.tier_nbytes if change.storage not in tier else 0
        if change.storage not in placements and tier_nbytes <= room:
            placements[change.storage] = change.placement
            nbytes -= change.nbytes
            room -= tier_nbytes
    return placements


def _first_between(gaps: ReuseGaps, machine: Machine, before: Candidate, after: Candidate, until: float) -> Candidate:
    """Return the first candidate between two neighbours that fits, changing one placement at a time."""
    placements = dict(before.placements)
    for storage, placement in after.placements.items():
        if time.monotonic() >= until:
            break
        if placements.get(storage) is not placement:
            placements[storage] = placement
            candidate = make_candidate(gaps, machine, dict(placements))
            if after.peak < candidate.peak < before.peak and candidate.peak <= machine.budget:
                return candidate
    return after


def _halfway(gaps: ReuseGaps, machine: Machine, before: Candidate, after: Candidate, until: float) -> Candidate:
    """Return a candidate between two neighbours that fits, near the first one, in few simulations."""
    new = [(storage, each) for storage, each in after.placements.items() if before.placements.get(storage) is not each]
    too_few, enough = 0, len(new)
    while enough - too_few > max(1, len(new) // HALVED) and time.monotonic() < until:
        middle = (too_few + enough) // 2
        candidate = make_candidate(gaps, machine, before.placements | dict(new[:middle]))
        if candidate.peak <= machine.budget:
            enough, after = middle, candidate
        else:
            too_few = middle
    return after


def _changes(gaps: ReuseGaps, machine: Machine, candidate: Candidate) -> list[PlacementChange]:
    """Return the changes of storages that are there at the peak and not read by the op, or read by an update.

    An update reads in windows what is offloaded.
    """
    forecast = candidate.forecast
    op = forecast.trace.ops[forecast.peak_index]
    read = forecast.trace.held_by(op.reads)
    costs = ChangeCosts(gaps, machine, candidate)
    changes: list[PlacementChange] = []
    for life in forecast.live_at(forecast.peak_index):
        is_idle = life.first < forecast.peak_index < life.last and life.storage not in read
        if is_idle:
            changes += costs.changes(life)
        elif op.phase == "update" or life.kind in ("state", "gradient"):
            changes += costs.state_changes(life)
    return changes


class ChangeCosts:
    """The placement changes of a candidate at its peak, and what they cost."""

    def __init__(self, gaps: ReuseGaps, machine: Machine, candidate: Candidate) -> None:
        self.gaps = gaps
        self.machine = machine
        self.forecast = forecast = candidate.forecast
        self.placements = {storage: placement_of(gaps, candidate.placements, storage) for storage in gaps.producer}
        self.states = {storage: candidate.placements.get(storage, Placement.KEEP) for storage in gaps.streamable.values}
        every = self.placements | self.states
        tier = {s: offloaded_nbytes(gaps, machine, s, each) for s, each in every.items() if each in COPIED}
        self.room = machine.link.capacity - sum(tier.values())
        self.overlapped_nbytes = sum(nbytes for storage, nbytes in tier.items() if every[storage] in OVERLAPPED)
        self.recomputed = {op.recomputes for op in forecast.trace.ops if op.recomputes}
        self.present = {life.storage for life in forecast.live_at(forecast.peak_index)}
        before = forecast.trace.ops[: forecast.peak_index + 1]
        self.read_in_backward = {value for op in before if op.phase == "backward" for value in op.reads}

    def changes(self, life: Lifetime) -> Iterator[PlacementChange]:
        """Yield the next placements of a storage that is there at the peak."""
        storage = self.gaps.origin(life, self.forecast.trace.op[life.producer])
        if storage in self.states:
            yield from self.state_changes(life)
        placement = self.placements.get(storage)
        if placement is None:
            return
        if storage != life.storage:
            yield from self._changes_of_copy(storage, placement, life.nbytes)
        elif placement in OVERLAPPED:
            yield self._offload(storage, BLOCKING[placement], life.nbytes)
        elif placement is Placement.KEEP:
            is_read = not self.read_in_backward.isdisjoint(self.gaps.values[storage])
            recompute = Placement.RECOMPUTE_PER_USE if is_read else Placement.RECOMPUTE
            yield from self._recompute(storage, recompute, life.nbytes)
            ways = (Placement.RELOAD_PER_USE, Placement.CAST_RELOAD_PER_USE) if is_read else OVERLAPPED
            yield from (self._offload(storage, new, life.nbytes) for new in ways if self._can_offload(storage, new))

    def state_changes(self, life: Lifetime) -> Iterator[PlacementChange]:
        """Yield the next placement of an input or a gradient: offloaded, or reloaded later."""
        storage = self.gaps.origin(life, self.forecast.trace.op[life.producer])
        value = self.gaps.streamable.values.get(storage)
        if value is None or not self.machine.streaming.can_offload(self.gaps.trace.op[value].fn):
            return
        placement = self.states[storage]
        fits = SMALLEST_STREAMED <= life.nbytes <= self.room
        if placement is Placement.KEEP and self.machine.link.works and fits:
            is_staged = self.gaps.trace.op[value].fn != "state"
            us = self._state_us(storage)
            yield PlacementChange(storage, Placement.OFFLOAD, life.nbytes, us, life.nbytes, is_staged)
        elif placement in BLOCKING_STATE and life.nbytes and life.first < self.forecast.peak_index < life.last:
            yield self._offload(storage, BLOCKING_STATE[placement], life.nbytes)

    def _state_us(self, storage: str) -> float:
        """Return the time that offloading a state adds: to the update, and in copies that do not overlap."""
        nbytes, link = self.gaps.trace.nbytes[storage], self.machine.link
        value = self.gaps.streamable.values[storage]
        fn = self.gaps.trace.op[value].fn
        write_us = nbytes / link.out if fn in ("parameter", "state") else 0.0
        update_us = (write_us + nbytes / link.back) * (value in self.gaps.streamable.updates)
        if fn == "state" and (rate := self.machine.streaming.host_update_rate):
            update_us = min(update_us, nbytes / rate)
        return update_us + (fn != "state") * self._overlapped_us(nbytes)

    def _changes_of_copy(self, storage: str, placement: Placement, nbytes: int) -> Iterator[PlacementChange]:
        """Yield the changes of what was recomputed or reloaded and waits for its use: later, or more often."""
        if placement is Placement.RECOMPUTE:
            yield from self._recompute(storage, Placement.RECOMPUTE_PER_USE, nbytes)
        if placement in OVERLAPPED:
            yield self._offload(storage, BLOCKING[placement], nbytes)
        elif placement not in (Placement.RELOAD_PER_USE, Placement.CAST_RELOAD_PER_USE):
            # What is cast already stays cast: that costs no more, and is copied in half the time.
            ways = (Placement.RELOAD_PER_USE, Placement.CAST_RELOAD_PER_USE)[placement in CAST :]
            yield from (self._offload(storage, new, nbytes) for new in ways if self._can_offload(storage, new))

    def _can_offload(self, storage: str, new: Placement) -> bool:
        if storage not in self.gaps.whole_value or not self.machine.link.works:
            return False
        nbytes = offloaded_nbytes(self.gaps, self.machine, storage, new)
        return nbytes <= self.room and (nbytes > 0 or new not in CAST)

    def _offload(self, storage: str, new: Placement, nbytes: int) -> PlacementChange:
        link, copied = self.machine.link, offloaded_nbytes(self.gaps, self.machine, storage, new)
        blocking_us = copied / link.out + copied / link.back + 2 * link.overhead_us(copied)
        us = self._overlapped_us(copied) if new in OVERLAPPED else blocking_us
        if new in CAST and self.placements[storage] not in CAST:
            us += self.machine.cast.us(self.gaps.trace.nbytes[storage])
        return PlacementChange(storage, new, nbytes, us, copied, is_staged=True)

    def _recompute(self, storage: str, new: Placement, nbytes: int) -> Iterator[PlacementChange]:
        """Yield the change that recomputes a storage, if it may be recomputed and that takes bytes from the peak."""
        if self.gaps.trace.op[self.gaps.producer[storage]].once:
            return
        us, kept = self._recompute_us(storage)
        nbytes -= sum(self.gaps.trace.nbytes[name] for name in kept - self.present)
        if nbytes > 0:
            yield PlacementChange(storage, new, nbytes, us)

    def _recompute_us(self, storage: str) -> tuple[float, set[str]]:
        """Return the time of all ops that recompute a storage, and the kept storages that they begin with."""
        us, kept, seen = 0.0, set[str](), set[str]()
        todo = [self.gaps.producer[storage]]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            us += self.gaps.trace.op[value].us
            for read in self.gaps.trace.op[value].reads:
                placements = {name: self.placements[name] for name in self.gaps.holds.get(read, ())}
                if all(each is Placement.KEEP for each in placements.values()):
                    kept.update(placements)
                elif not self._is_there_anyway(read, placements):
                    todo.append(read)
        return us, kept

    def _is_there_anyway(self, value: str, placements: dict[str, Placement]) -> bool:
        is_recomputed = value in self.recomputed and Placement.RECOMPUTE_PER_USE not in placements.values()
        return is_recomputed or any(each in OFFLOADED for each in placements.values())

    def _overlapped_us(self, nbytes: int) -> float:
        """Return the time of copies beyond what the links carry in a phase, and of compute's slower memory."""
        begins, boundary, link = self.gaps.begins, self.gaps.trace.boundary, self.machine.link
        phases = (begins[boundary], link.out), (begins[-1] - begins[boundary], link.back)
        copied = self.overlapped_nbytes + nbytes
        late = sum(min(nbytes / rate, max(0.0, copied / rate - phase_us)) for phase_us, rate in phases)
        return late + 2 * (nbytes / MEMORY_RATE + link.overhead_us(nbytes))
