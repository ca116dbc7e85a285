"""Explain the peak of a memory snapshot of torch: what was allocated then, from where, and what lies between.

snapshot_peaks(snapshot)   ->   device 0: at most 6.1 GB in use, of 8.0 GB held
                                at the peak: 16 x 268.4 MB net.py:7 forward, ...

What existed before the trace began is known from what is left at its end and from what was freed in it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from .tables import mb, stacked, table, unstyled
from .torch_snapshot import DeviceHistory, Event

if TYPE_CHECKING:
    from rich.console import RenderableType

TOP = 12  # places that are printed
FREED = ("free_completed", "free")  # "free" is that of older snapshots
HELD = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
UNKNOWN = "allocated before the trace began, or without a stack"


@dataclass(frozen=True, slots=True)
class Place:
    """Buffers that one source line allocated."""

    where: str
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """An allocation that failed for want of memory; `free` bytes were left on the device."""

    where: str
    nbytes: int
    free: int


@dataclass(frozen=True, slots=True)
class SnapshotPeak:
    """The peak of one device over a trace of allocations.

    Attributes:
        peak: most bytes in use at once. held: bytes that the allocator held of the device then.
        at: number of the event behind which that was; 0 is the begin. events: number of all.
        places: what was in use then, the largest first.
        reserved, active: bytes held, and in use, when the snapshot was taken.
        rounding: bytes of these in use that nothing asked for.
        gaps: bytes that are free in segments which hold something and that the allocator keeps.
        largest_gap: the largest free block among them.
        cached: bytes of segments that hold nothing.
        refusals: allocations that failed.
    """

    device: int
    peak: int
    held: int
    at: int
    events: int
    places: tuple[Place, ...]
    reserved: int
    active: int
    rounding: int
    gaps: int
    largest_gap: int
    cached: int
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """The peaks of all devices of a snapshot."""

    peaks: tuple[SnapshotPeak, ...]

    def to_json(self) -> str:
        """Return the peaks as JSON; the fields are those of `SnapshotPeak`."""
        return json.dumps([asdict(peak) for peak in self.peaks], indent=1)

    def __rich__(self) -> RenderableType:
        return stacked(*(part for peak in self.peaks for part in _printed(peak)))


def snapshot_peaks(snapshot: tuple[DeviceHistory, ...]) -> SnapshotReport:
    """Return the peak of each device, and what was in use then."""
    return SnapshotReport(tuple(map(_peak, snapshot)))


def _peak(history: DeviceHistory) -> SnapshotPeak:
    live = _live_at_begin(history)
    held = sum(segment.size for segment in history.segments)
    held -= sum(HELD.get(event.action, 0) * event.size for event in history.events)
    used = peak = sum(nbytes for nbytes, _ in live.values())
    at, held_then, before = 0, held, dict(live)
    for number, event in enumerate(history.events, 1):
        held += HELD.get(event.action, 0) * event.size
        used += _carry_out(event, live)
        if used > peak:
            peak, at, held_then = used, number, held
    for event in history.events[:at]:
        _carry_out(event, before)
    refusals = tuple(Refusal(each.where, each.size, each.free) for each in history.events if each.action == "oom")
    facts = history.device, peak, held_then, at, len(history.events), _places(before)
    return SnapshotPeak(*facts, *_between(history), refusals)


def _live_at_begin(history: DeviceHistory) -> dict[int, tuple[int, str]]:
    """Return the bytes and the place of each buffer by address: what is left at the end, with all events undone."""
    blocks = (block for segment in history.segments for block in segment.blocks if block.is_active)
    live = {block.address: (block.requested, block.where) for block in blocks}
    for event in reversed(history.events):
        if event.action == "alloc":
            live.pop(event.address, None)
        elif event.action in FREED:
            live[event.address] = event.size, ""  # its stack is that of the free
    return live


def _carry_out(event: Event, live: dict[int, tuple[int, str]]) -> int:
    """Change what is live as an event did, and return by how many bytes."""
    if event.action == "alloc":
        live[event.address] = event.size, event.where
        return event.size
    if event.action in FREED and event.address in live:
        return -live.pop(event.address)[0]
    return 0


def _places(live: dict[int, tuple[int, str]]) -> tuple[Place, ...]:
    nbytes, count = Counter[str](), Counter[str]()
    for size, where in live.values():
        nbytes[where or UNKNOWN] += size
        count[where or UNKNOWN] += 1
    return tuple(Place(where, size, count[where]) for where, size in nbytes.most_common())


def _between(history: DeviceHistory) -> tuple[int, int, int, int, int, int]:
    """Return reserved, active, rounding, gaps, largest gap and cached bytes at the end."""
    reserved = sum(segment.size for segment in history.segments)
    active = [block for segment in history.segments for block in segment.blocks if block.is_active]
    partly = [segment for segment in history.segments if any(block.is_active for block in segment.blocks)]
    gaps = [block.size for segment in partly for block in segment.blocks if not block.is_active]
    cached = reserved - sum(segment.size for segment in partly)
    in_use = sum(block.requested for block in active)
    return reserved, in_use, sum(block.size for block in active) - in_use, sum(gaps), max(gaps, default=0), cached


def _printed(peak: SnapshotPeak) -> Iterator[RenderableType]:
    lines = [
        f"device {peak.device}: at most {mb(peak.peak)} in use, of {mb(peak.held)} held by torch's allocator; "
        f"behind event {peak.at} of {peak.events}",
        f"at the end {mb(peak.active)} in use, of {mb(peak.reserved)} held: {mb(peak.rounding)} are rounding, "
        f"{mb(peak.gaps)} lie between buffers, in blocks of {mb(peak.largest_gap)} at most, {mb(peak.cached)} can be "
        "given back",
        *(
            f"refused: {mb(each.nbytes)} at {each.where or 'an unknown place'}; the device had {mb(each.free)} left"
            for each in peak.refusals
        ),
    ]
    yield unstyled("\n".join([*lines, ""]))
    rows = table("at the peak", "bytes", "buffers", "where", right=("bytes", "buffers"))
    for place in peak.places[:TOP]:
        rows.add_row(mb(place.nbytes), str(place.count), place.where)
    if rest := peak.places[TOP:]:
        count = str(sum(place.count for place in rest))
        rows.add_row(mb(sum(place.nbytes for place in rest)), count, f"{len(rest)} other places")
    yield rows
