"""How fast bytes go to the far tier and back, by the size of a copy; and how fast they are cast for their way.

    disk_links("/var/tmp")  ->  out: 0.4 ms for 256 KiB, 5 ms for 4 MiB, 38 ms for 32 MiB; back: ...

Measured at first use, as a step copies, and kept with the costs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from passes import Trace

from ..storage.disk_tier import DiskTier
from ..storage.io_threads import CHUNK, STAGING, WORKERS
from ..storage.pinned_tier import pinned_speed
from ..storage.spill_file import PAGE, available_nbytes, mount_description, spill_folder
from ..storage.wire_cast import narrow, widen
from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import shortest_us

SIZES = {256 << 10: 16, 4 << 20: 4, 32 << 20: 1}  # bytes, and how many copies of that size stand in line
TRIES = 2  # because a block's first write is not like the others
SECONDS = 0.8  # for all of it; on a slow disk the larger sizes are left out


@dataclass(frozen=True)
class Link:
    """One direction: bytes, and the microseconds that a copy of so many takes in a line of such, by bytes."""

    points: tuple[tuple[int, float], ...]

    def us(self, nbytes: int) -> float:
        """The time of a copy: between two sizes on the line through them, beyond the last at its rate."""
        (least, shortest), (most, longest) = self.points[0], self.points[-1]
        if nbytes <= least:
            return shortest * nbytes / least
        for (small, short), (large, long) in zip(self.points, self.points[1:], strict=False):
            if nbytes <= large:
                return short + (long - short) * (nbytes - small) / (large - small)
        return longest * nbytes / most

    def rate(self, sizes: Sequence[int]) -> float:
        """The one rate, in bytes per microsecond, at which copies of all these sizes take as long as they do."""
        return sum(sizes) / sum(map(self.us, sizes))


Links = tuple[Link, Link]  # out, back
_known: dict[str, Links] = {}


def sizes_of(trace: Trace) -> list[int]:
    """The bytes of each value that may be sent away: that forward makes and backward reads."""
    return [nbytes for nbytes in trace.saved.values() if nbytes]


def measure_disk(folder: str | os.PathLike[str] | None = None, room: int | None = None) -> Links:
    """The links to the file system of `folder`.  All of its folders are taken to be alike.

    Args:
        room: the bytes of memory that measuring may take; large copies that do not fit are left out, and small ones are
            fewer.  So they are on a disk that is nearly full.
    """
    there = spill_folder(folder)
    sizes = _fitting(room, available_nbytes(there))
    method = f"{sizes} {WORKERS} x {CHUNK}"
    return _found(
        f"link {mount_description(there)} {method} {environment_key(torch.device('cpu'))}",
        lambda: _measure_disk(there, sizes),
    )


def _fitting(room: int | None, free: int) -> dict[int, int]:
    """The sizes that are measured in so much memory, whose copies have one source, and which the free bytes of the disk
    hold twice; each with its number of copies, and at least one."""
    fits = {nbytes: min(count, free // (2 * nbytes)) for nbytes, count in SIZES.items()}
    if room is not None:
        fits = {nbytes: min(count, (room - STAGING) // nbytes - 1) for nbytes, count in fits.items()}
    least = min(SIZES) if free >= 2 * min(SIZES) else PAGE
    return {nbytes: count for nbytes, count in fits.items() if count > 0} or {least: 1}


def measure_host(device: torch.device) -> Links:
    """The links between a GPU and pinned memory."""
    return _found(f"link {device} {environment_key(device)}", lambda: _measure_host(device))


def measure_casts(device: torch.device) -> Links:
    """How fast values are cast for their way, and back; by their bytes before and after both.

    On a GPU it is also found which way is the fastest, which is what steps take from now on.
    """
    if device.type == "cuda":
        from ..kernels.cast import tune_cast  # here, for the reason in `wire_cast.py`

        tune_cast(device, narrow)
    return _found(f"cast {SIZES} {device} {environment_key(device)}", lambda: _measure_casts(device))


def _found(key: str, measure: Callable[[], Links]) -> Links:
    return measure_once(_known, key, measure, _read, lambda links: [link.points for link in links])


def _read(kept: Any) -> Links:
    out, back = (Link(tuple((nbytes, us) for nbytes, us in points)) for points in kept)
    return out, back


def _measure_host(device: torch.device) -> Links:
    rates = {nbytes: pinned_speed(device, nbytes, line) for nbytes, line in SIZES.items()}
    out, back = (Link(tuple((nbytes, nbytes / rate[i]) for nbytes, rate in rates.items())) for i in (0, 1))
    return out, back


def _measure_casts(device: torch.device) -> Links:
    out: dict[int, float] = {}
    back: dict[int, float] = {}
    for nbytes in SIZES:
        wide = torch.zeros(nbytes // 4, device=device)
        thin = narrow(wide)
        out[nbytes] = shortest_us(partial(narrow, wide), device)
        back[nbytes] = shortest_us(partial(widen, thin), device)
    return Link(tuple(out.items())), Link(tuple(back.items()))


def _measure_disk(folder: Path, sizes: Mapping[int, int]) -> Links:
    end = time.perf_counter() + SECONDS
    out: dict[int, float] = {}
    back: dict[int, float] = {}
    slowest = 0.0  # seconds for a byte there and back
    for nbytes, count in sizes.items():
        if slowest * TRIES * count * nbytes > end - time.perf_counter():
            break
        there, again = _copied(DiskTier([nbytes] * count, folder))
        out[nbytes], back[nbytes] = there / count, again / count
        slowest = (out[nbytes] + back[nbytes]) / nbytes / 1e6
    return Link(tuple(out.items())), Link(tuple(back.items()))


def _copied(tier: DiskTier) -> tuple[float, float]:
    """Microseconds to fill every slot, and to fetch them all; the last of some tries."""
    lease = tier.lease()
    sent = random_bytes(tier.slots[0])
    out = back = 0.0
    for _ in range(TRIES):
        out = _all(tier, lambda slot: lease.offload(slot, sent), lease.free)
    for _ in range(TRIES):  # into new memory, as in a step
        back = _all(tier, lambda slot: lease.reload(slot, torch.empty_like(sent)), lease.wait)
    lease.release()
    tier.close()
    return out, back


def random_bytes(nbytes: int) -> Tensor:
    """So many random bytes, because some disks store zeros faster; nobody else's random numbers change."""
    return torch.empty(nbytes, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(1))


def _all(tier: DiskTier, start: Callable[[int], None], end: Callable[[int], None]) -> float:
    """Microseconds until every slot was started, and then every slot has ended."""
    begin = time.perf_counter()
    for slot in range(len(tier.slots)):
        start(slot)
    for slot in range(len(tier.slots)):
        end(slot)
    return (time.perf_counter() - begin) * 1e6
