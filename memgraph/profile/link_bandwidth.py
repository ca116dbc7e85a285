"""Measure the bandwidth between device and tier by copy size, and the speed of casts for a copy.

    measure_files("/var/tmp")  ->  out: 0.4 ms for 256 KiB, 5 ms for 4 MiB, 38 ms for 32 MiB; back: ...

Measured at first use, with the copies of a step, and cached.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from passes import Trace

from ..storage.file_space import FileSpace, Space, file_space
from ..storage.file_tier import FileTier
from ..storage.io_threads import CHUNK, STAGING, WORKERS
from ..storage.pinned_tier import pinned_speed
from ..storage.spill_file import PAGE
from ..storage.wire_cast import narrow, widen
from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import shortest_us

SMALLEST = 256 << 10  # bytes of a copy
SIZES = {SMALLEST: 16, 4 << 20: 4, 32 << 20: 1}  # bytes, and the number of copies of that size that are queued
DISK_US, HOST_US, CAST_US = 300.0, 20.0, 40.0  # of the smallest copy, where nothing can be measured
TRIES = 2  # because the first write of a block is slower
SECONDS = 0.8  # for all sizes; on a slow disk the larger ones are left out


@dataclass(frozen=True)
class Link:
    """One direction of a link: (bytes, microseconds) of a queued copy, by increasing size."""

    points: tuple[tuple[int, float], ...]

    def us(self, nbytes: int) -> float:
        """Return the time of a copy: interpolated between sizes, and at the last rate beyond the largest."""
        (least, shortest), (most, longest) = self.points[0], self.points[-1]
        if nbytes <= least:
            return shortest * nbytes / least
        for (small, short), (large, long) in zip(self.points, self.points[1:], strict=False):
            if nbytes <= large:
                return short + (long - short) * (nbytes - small) / (large - small)
        return longest * nbytes / most

    def rate(self, sizes: Sequence[int]) -> float:
        """Return the average rate of copies of these sizes, in bytes per microsecond."""
        return sum(sizes) / sum(map(self.us, sizes))


Links = tuple[Link, Link]  # out, back
_known: dict[str, Links] = {}


def sizes_of(trace: Trace, budget: float = math.inf) -> list[int]:
    """Return the bytes of each value that may be offloaded: made by forward, and read by backward.

    If the inputs of the step are more than the budget, parameters have to be offloaded too. They may be much larger
    than what is made of a small batch, and larger copies are faster.
    """
    inputs = [op for op in trace.ops if op.is_input]
    streamed = [op for op in inputs if op.fn == "parameter"] if sum(op.nbytes for op in inputs) > budget else []
    return [nbytes for nbytes in (*trace.saved.values(), *(op.nbytes for op in streamed)) if nbytes]


def measure_files(space: Space = None, room: int | None = None) -> Links:
    """Return the links to files in a folder, or in host memory.

    Args:
        room: bytes of memory that measuring may use. Copies that do not fit in it or on the disk are left out; if none
            fits in `room`, the links are guessed.
    """
    space = file_space(space)
    sizes = _fitting(room, space.free_nbytes)
    if not sizes:
        return _guessed(DISK_US)
    method = f"{sizes} {WORKERS} x {CHUNK}"
    return _measure_once(
        f"link {space.description} {method} {environment_key(torch.device('cpu'))}",
        lambda: _measure_files(space, sizes),
    )


def _fitting(room: int | None, free: int) -> dict[int, int]:
    """Return the sizes to measure, and the number of copies of each.

    The copies share one source in memory. The free bytes of the disk must hold them twice. `room` is half of what there
    is; a single copy, if no more fit, may take the other half as well.
    """
    fits = {nbytes: min(count, free // (2 * nbytes)) for nbytes, count in SIZES.items()}
    if room is not None:
        fits = {nbytes: min(count, (room - STAGING) // nbytes - 1) for nbytes, count in fits.items()}
    least = SMALLEST if free >= 2 * SMALLEST else PAGE
    single = {least: 1} if room is None or 2 * least <= 2 * room - STAGING else {}
    return {nbytes: count for nbytes, count in fits.items() if count > 0} or single


def measure_host(device: torch.device, room: int | None = None) -> Links:
    """Return the links between a GPU and pinned memory.

    Args:
        room: bytes of the GPU that measuring may use. Larger copies are left out; if none fits, the links are guessed.
    """
    sizes = _within(room)
    key = f"link registered {sizes} {device} {environment_key(device)}"
    return _measure_once(key, lambda: _measure_host(device, sizes)) if sizes else _guessed(HOST_US)


def measure_casts(device: torch.device, room: int | None = None) -> Links:
    """Return the speed of the casts before an offload and after a reload, by the bytes of the uncast value.

    On a GPU this also tunes the kernel that later steps use.

    Args:
        room: bytes of the device that measuring may use. Larger values are left out; if none fits, the speed is
            guessed.
    """
    if device.type == "cuda":
        from ..kernels.cast import tune_cast  # here, for the reason in `wire_cast.py`

        tune_cast(device, narrow, room)
    sizes = _within(None if room is None else room // 3)  # the value, its cast, and that cast back
    key = f"cast {sizes} {device} {environment_key(device)}"
    return _measure_once(key, lambda: _measure_casts(device, sizes)) if sizes else _guessed(CAST_US)


def _within(room: int | None) -> dict[int, int]:
    """Return the bytes of copies that fit in `room` one by one, and the number of each that is measured in a row."""
    return {nbytes: line for nbytes, line in SIZES.items() if room is None or nbytes <= room}


def _guessed(us: float) -> Links:
    """Return links by which the smallest copy takes so long. Still smaller ones would show no link's rate."""
    link = Link(((SMALLEST, us),))
    return link, link


def _measure_once(key: str, measure: Callable[[], Links]) -> Links:
    return measure_once(_known, key, measure, _read, lambda links: [link.points for link in links])


def _read(cached: Any) -> Links:
    out, back = (Link(tuple((nbytes, us) for nbytes, us in points)) for points in cached)
    return out, back


def _measure_host(device: torch.device, sizes: Mapping[int, int]) -> Links:
    rates = {nbytes: pinned_speed(device, nbytes, line) for nbytes, line in sizes.items()}
    out, back = (Link(tuple((nbytes, nbytes / rate[i]) for nbytes, rate in rates.items())) for i in (0, 1))
    return out, back


def _measure_casts(device: torch.device, sizes: Iterable[int]) -> Links:
    out: dict[int, float] = {}
    back: dict[int, float] = {}
    for nbytes in sizes:
        wide = torch.zeros(nbytes // 4, device=device)
        thin = narrow(wide)
        out[nbytes] = shortest_us(partial(narrow, wide), device)
        back[nbytes] = shortest_us(partial(widen, thin), device)
    return Link(tuple(out.items())), Link(tuple(back.items()))


def _measure_files(space: FileSpace, sizes: Mapping[int, int]) -> Links:
    end = time.perf_counter() + SECONDS
    out: dict[int, float] = {}
    back: dict[int, float] = {}
    slowest = 0.0  # seconds to offload and reload a byte
    for nbytes, count in sizes.items():
        if slowest * TRIES * count * nbytes > end - time.perf_counter():
            break
        out_us, back_us = _copied(FileTier([nbytes] * count, space))
        out[nbytes], back[nbytes] = out_us / count, back_us / count
        slowest = (out[nbytes] + back[nbytes]) / nbytes / 1e6
    return Link(tuple(out.items())), Link(tuple(back.items()))


def _copied(tier: FileTier) -> tuple[float, float]:
    """Return the microseconds to offload to all slots, and to reload all, in the last of some tries."""
    lease = tier.lease()
    data = random_bytes(tier.slots[0])
    out = back = 0.0
    for _ in range(TRIES):
        out = _all(tier, lambda slot: lease.offload(slot, data), lease.free)
    for _ in range(TRIES):  # into new memory, as in a step
        back = _all(tier, lambda slot: lease.reload(slot, torch.empty_like(data)), lease.wait)
    lease.release()
    tier.close()
    return out, back


def random_bytes(nbytes: int) -> Tensor:
    """Return random bytes, since some disks store zeros faster, without changing torch's random state."""
    words = torch.empty(-(-nbytes // 8), dtype=torch.int64)  # one draw gives eight bytes
    return words.random_(-(2**63), None, generator=torch.Generator().manual_seed(1)).view(torch.uint8)[:nbytes]


def _all(tier: FileTier, start: Callable[[int], None], end: Callable[[int], None]) -> float:
    """Return the microseconds to start the copies of all slots and to wait for them."""
    begin = time.perf_counter()
    for slot in range(len(tier.slots)):
        start(slot)
    for slot in range(len(tier.slots)):
        end(slot)
    return (time.perf_counter() - begin) * 1e6
