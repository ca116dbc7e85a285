"""Lower the peak step by step: at the peak, give up what costs the least time per byte.

    18.9 MB at mm_7   recompute gelu_3 (4.2 MB, 310 us), offload add_2 (2.1 MB)
    14.1 MB at mm_9   ...

The way down does not depend on the budget.  Its states whose peak is below that of all before form a falling sequence,
and a budget takes the first of them that fits: so the peak never rises when the budget falls, and the last of them is
the least budget. Greedy: a storage that was given up is not taken back.  Within 0.5 % of the best plan on layers that
repeat, worse on others.
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

GRAIN = 0.04  # of the movable bytes at the first peak: what is given up between two simulations
COARSE = 0.3  # the same once the work for fine steps is used up
LAST = 3  # times that work is what is simulated in all, and never less than for so many states
FEWEST = 4
SENT = (*OFFLOADED, *STATE_OFFLOADED)
NEXT_HOME = {Placement.OFFLOAD: Placement.OFFLOAD_BLOCKING, Placement.STREAM: Placement.OFFLOAD_BLOCKING}
LATER = {Placement.OFFLOAD: Placement.OFFLOAD_BLOCKING, Placement.CAST_OFFLOAD: Placement.CAST_OFFLOAD_BLOCKING}
MEMORY_RATE = 4000.0  # bytes per microsecond at which compute's own memory traffic is slowed by a copy


def greedy_plan(trace: Trace, machine: Machine, until: float = math.inf, fine: float = math.inf) -> Plan:
    """The decisions of the first state on the way down that fits the budget; of the lowest, if none does, or none until
    `until`, as `time.monotonic` has it.  Once `fine` ops were simulated the steps are coarse, and few."""
    gaps = ReuseGaps(trace)
    ops = LAST * max(fine, FEWEST * len(trace.ops))
    return greedy_from(gaps, machine, make_candidate(gaps, machine, {}), until, ops, fine).plan


def greedy_from(
    gaps: ReuseGaps,
    machine: Machine,
    lowest: Candidate,
    until: float = math.inf,
    ops: float = math.inf,
    fine: float = math.inf,
) -> Candidate:
    """The first state that fits on the way down from one that does not; the lowest, if none does, or none in time or
    before so many `ops` were simulated."""
    for before, after in _way_down(gaps, machine, lowest, until, ops, fine):
        if after.peak <= machine.budget:
            between = _halfway if len(gaps.trace.ops) * len(after.placements) > fine else _first_between
            return between(gaps, machine, before, after, until)
        lowest = after
    return lowest


def greedy_plan_no_offload(trace: Trace, machine: Machine, until: float = math.inf, fine: float = math.inf) -> Plan:
    """The same without the far tier."""
    return greedy_plan(trace, machine.without_tier, until, fine) if machine.link.out else ()


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """A new fate for a storage: the bytes it takes from the peak, the time it costs, the bytes on the far tier."""

    storage: str
    fate: Placement
    nbytes: int
    us: float
    sent: int = 0

    @property
    def price(self) -> float:
        return self.us / self.nbytes


def _way_down(
    gaps: ReuseGaps, machine: Machine, state: Candidate, until: float, ops: float, fine: float
) -> Iterator[tuple[Candidate, Candidate]]:
    """Pairs of neighbouring states with falling peaks; what did not lower the peak is part of the next step."""
    known = {*gaps.producer, *gaps.streamable.values}
    movable = sum(life.nbytes for life in state.forecast.live_at(state.forecast.peak_index) if life.storage in known)
    lowest = state
    while ops > 0 and time.monotonic() < until and (moves := _moves(gaps, machine, state)):
        away = {s: offloaded_nbytes(gaps, machine, s, known) for s, known in state.placements.items() if known in SENT}
        room = machine.link.capacity - sum(away.values())
        nbytes = int(movable * (GRAIN if fine > 0 else COARSE))
        state = make_candidate(gaps, machine, state.placements | _batch(moves, nbytes, away, room))
        ops, fine = ops - len(state.forecast.trace.ops), fine - len(state.forecast.trace.ops)
        if state.peak < lowest.peak:
            yield lowest, state
            lowest = state
    if state.peak == lowest.peak:
        yield lowest, state  # with nothing movable left at the peak it shows best what is in the way


def _batch(moves: list[PlacementChange], nbytes: int, away: Container[str], room: int) -> dict[str, Placement]:
    """The cheapest moves that make up `nbytes`, one at the least; what is not yet `away` has to fit in `room`."""
    batch: dict[str, Placement] = {}
    for move in sorted(moves, key=lambda move: (move.price, move.storage)):
        if batch and nbytes <= 0:
            break
        leaves = move.sent if move.storage not in away else 0
        if move.storage not in batch and leaves <= room:
            batch[move.storage] = move.fate
            nbytes -= move.nbytes
            room -= leaves
    return batch


def _first_between(gaps: ReuseGaps, machine: Machine, before: Candidate, after: Candidate, until: float) -> Candidate:
    """The first state between two neighbours that fits, moves being made one by one."""
    fates = dict(before.placements)
    for storage, new in after.placements.items():
        if time.monotonic() >= until:
            break
        if fates.get(storage) is not new:
            fates[storage] = new
            state = make_candidate(gaps, machine, dict(fates))
            if after.peak < state.peak < before.peak and state.peak <= machine.budget:
                return state
    return after


def _halfway(gaps: ReuseGaps, machine: Machine, before: Candidate, after: Candidate, until: float) -> Candidate:
    """A state between two neighbours that fits, as near to the first as halving finds one: in few simulations."""
    new = [(storage, fate) for storage, fate in after.placements.items() if before.placements.get(storage) is not fate]
    low, high = 0, len(new)  # so many moves do not do, and so many do
    while high - low > 1 and time.monotonic() < until:
        middle = (low + high) // 2
        state = make_candidate(gaps, machine, before.placements | dict(new[:middle]))
        if state.peak <= machine.budget:
            high, after = middle, state
        else:
            low = middle
    return after


def _moves(gaps: ReuseGaps, machine: Machine, state: Candidate) -> list[PlacementChange]:
    """What can be given up at the peak: movable storages that are there and not in use; the update uses in windows what
    is far."""
    forecast = state.forecast
    op = forecast.trace.ops[forecast.peak_index]
    in_use = {held for read in op.reads for held in forecast.trace.op[read].holds}
    costs = ChangeCosts(gaps, machine, state)
    found: list[PlacementChange] = []
    for life in forecast.live_at(forecast.peak_index):
        rests = life.first < forecast.peak_index < life.last and life.storage not in in_use
        if rests or op.phase == "update" or life.kind in ("state", "gradient"):
            found += costs.moves(life) if rests else costs.homeward(life)
    return found


class ChangeCosts:
    """What giving up a storage costs in the state as it is."""

    def __init__(self, gaps: ReuseGaps, machine: Machine, state: Candidate) -> None:
        self.gaps = gaps
        self.machine = machine
        self.forecast = state.forecast
        self.fates = {storage: placement_of(gaps, state.placements, storage) for storage in gaps.producer}
        self.homes = {storage: state.placements.get(storage, Placement.KEEP) for storage in gaps.streamable.values}
        self.known = self.fates | self.homes
        self.sent = {s: offloaded_nbytes(gaps, machine, s, known) for s, known in self.known.items() if known in SENT}
        self.room = machine.link.capacity - sum(self.sent.values())
        self.again = {op.recomputes for op in self.forecast.trace.ops if op.recomputes}
        at = self.forecast.peak_index
        self.present = {life.storage for life in state.forecast.live_at(at)}
        self.backward_before = {
            name for op in self.forecast.trace.ops[: at + 1] if op.phase == "backward" for name in op.reads
        }

    def moves(self, life: Lifetime) -> Iterator[PlacementChange]:
        """The next fates of a storage that is there at the peak."""
        storage = self.gaps.origin(life, self.forecast.trace.op[life.producer])
        if storage in self.homes:
            yield from self.homeward(life)
        now = self.fates.get(storage)
        if now is None:
            return
        if storage != life.storage:
            yield from self._moves_of_copy(storage, now, life.nbytes)
        elif now in OVERLAPPED:
            yield self._away(storage, LATER[now], life.nbytes)
        elif now is Placement.KEEP:
            used = not self.backward_before.isdisjoint(self.gaps.values[storage])
            yield from self._remake(storage, Placement.RECOMPUTE_PER_USE if used else Placement.RECOMPUTE, life.nbytes)
            ways = (Placement.RELOAD_PER_USE, Placement.CAST_RELOAD_PER_USE) if used else OVERLAPPED
            yield from (self._away(storage, new, life.nbytes) for new in ways if self._can(storage, new))

    def homeward(self, life: Lifetime) -> Iterator[PlacementChange]:
        """Where an input or a gradient that is there at the peak can live, or come to later."""
        storage = self.gaps.origin(life, self.forecast.trace.op[life.producer])
        value = self.gaps.streamable.values.get(storage)
        now = (
            self.homes[storage] if value and self.machine.streaming.can_offload(self.gaps.trace.op[value].fn) else None
        )
        there = self.machine.link.works
        if now is Placement.KEEP and there and SMALLEST_STREAMED <= life.nbytes <= self.room:
            yield PlacementChange(storage, Placement.OFFLOAD, life.nbytes, self._home_us(storage), life.nbytes)
        elif now in NEXT_HOME and life.nbytes and life.first < self.forecast.peak_index < life.last:
            yield self._away(storage, NEXT_HOME[now], life.nbytes)

    def _home_us(self, storage: str) -> float:
        """What a far home costs: the update's windows, and what of the step's own traffic does not hide."""
        trace, nbytes = self.gaps.trace, self.gaps.trace.nbytes[storage]
        value = self.gaps.streamable.values[storage]
        updated = any(value in op.reads for op in trace.ops if op.phase == "update")
        fn = trace.op[value].fn
        goes = nbytes / self.machine.link.out if fn in ("parameter", "state") else 0.0
        own = (goes + nbytes / self.machine.link.back) * updated
        if fn == "state" and self.machine.streaming.host_update_rate:  # or the host updates it there
            own = min(own, nbytes / self.machine.streaming.host_update_rate)
        return own + (fn != "state") * self._offload_us(nbytes)

    def _moves_of_copy(self, storage: str, now: Placement, nbytes: int) -> Iterator[PlacementChange]:
        """What was made again or came back, and waits for its use, can be made or fetched later, or more often."""
        if now is Placement.RECOMPUTE:
            yield from self._remake(storage, Placement.RECOMPUTE_PER_USE, nbytes)
        if now in OVERLAPPED:
            yield self._away(storage, LATER[now], nbytes)
        elif now not in (Placement.RELOAD_PER_USE, Placement.CAST_RELOAD_PER_USE):
            # What is cast already stays so: it costs no more, and takes half as long.
            ways = (
                (Placement.CAST_RELOAD_PER_USE,)
                if now in CAST
                else (Placement.RELOAD_PER_USE, Placement.CAST_RELOAD_PER_USE)
            )
            yield from (self._away(storage, new, nbytes) for new in ways if self._can(storage, new))

    def _can(self, storage: str, new: Placement) -> bool:
        """Whether `storage` can leave in this way."""
        if storage not in self.gaps.whole_value or not self.machine.link.works:
            return False
        nbytes = offloaded_nbytes(self.gaps, self.machine, storage, new)
        return nbytes <= self.room and (nbytes > 0 or new not in CAST)

    def _away(self, storage: str, new: Placement, nbytes: int) -> PlacementChange:
        sent = offloaded_nbytes(self.gaps, self.machine, storage, new)
        trip = sent / self.machine.link.out + sent / self.machine.link.back + 2 * self.machine.link.overhead_us(sent)
        us = self._offload_us(sent) if new in OVERLAPPED else trip
        if new in CAST and self.fates[storage] not in CAST:
            us += self.machine.cast.us(self.gaps.trace.nbytes[storage])
        return PlacementChange(storage, new, nbytes, us, sent)

    def _remake(self, storage: str, new: Placement, nbytes: int) -> Iterator[PlacementChange]:
        """The move that makes `storage` again, if that is allowed and takes bytes from the peak."""
        if self.gaps.trace.op[self.gaps.producer[storage]].once:
            return
        us, kept = self._chain(storage)
        nbytes -= sum(self.gaps.trace.nbytes[name] for name in kept - self.present)
        if nbytes > 0:
            yield PlacementChange(storage, new, nbytes, us)

    def _chain(self, storage: str) -> tuple[float, set[str]]:
        """The time of all ops that have to run to make `storage` again, and the kept storages that they start from."""
        us, kept, seen = 0.0, set[str](), set[str]()
        todo = [self.gaps.producer[storage]]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            us += self.gaps.trace.op[value].us
            for read in self.gaps.trace.op[value].reads:
                fates = {name: self.fates[name] for name in self.gaps.holds.get(read, ())}
                if all(known is Placement.KEEP for known in fates.values()):
                    kept.update(fates)
                elif not self._comes_anyway(read, fates):
                    todo.append(read)
        return us, kept

    def _comes_anyway(self, value: str, fates: dict[str, Placement]) -> bool:
        return (value in self.again and Placement.RECOMPUTE_PER_USE not in fates.values()) or any(
            known in OFFLOADED for known in fates.values()
        )

    def _offload_us(self, nbytes: int) -> float:
        """What does not hide: copies beyond what the links carry in a phase, and compute's share of the memory's
        rate."""
        begins, boundary = self.gaps.begins, self.gaps.trace.boundary
        sent = sum(sent for storage, sent in self.sent.items() if self.known[storage] in OVERLAPPED)
        windows = (begins[boundary], self.machine.link.out), (begins[-1] - begins[boundary], self.machine.link.back)
        late = sum(min(nbytes / rate, max(0.0, (sent + nbytes) / rate - window)) for window, rate in windows)
        return late + 2 * (nbytes / MEMORY_RATE + self.machine.link.overhead_us(nbytes))
