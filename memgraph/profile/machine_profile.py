"""Measure the links between a device and its tiers.

measure_links(machine, "disk", device, folder, sizes)   ->   the machine with bytes per microsecond out and back
measure_tiers(machine, ("host", "disk"), device, places, sizes)   ->   the same with a link for each tier

Measure the time that compute loses to copies: for each copy, and for each byte.

    measure_copy_overhead("/var/tmp", links)  ->  60 us a copy, 0.00001 us a byte

Threads of this process do the copies. They need the interpreter to start a copy, and cores that compute uses.
Measured at first use with the current number of threads, and cached.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from passes import Cast, Machine
from passes.ir.machine import Tier

from ..graph.ops import op_context
from ..guards.signature import kernel_modes
from ..storage.file_space import FileSpace, Space, file_space
from ..storage.file_tier import FileLease, FileTier
from ..storage.io_threads import STAGING
from ..storage.mapped_storage import BufferAllocator
from ..storage.pinned_pool import cap_nbytes
from ..storage.pinned_storage import PinnedBufferAllocator
from ..storage.places import Places
from ..system import reference_op
from ..system.device import CPU
from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import repeats, shortest_us, timed_us
from .link_bandwidth import Links, measure_casts, measure_files, measure_host, random_bytes

USUAL_SIZES = 4 << 20  # bytes of a value, if the sizes to offload are not given
NBYTES, COPIES = 1 << 20, 8  # size and number of the copies that are timed
TRIES = 5
SIDE = 320  # of the matrices that are multiplied during the copies and between them
MATRICES = 3 * 4 * SIDE**2  # bytes of two of them, and of a product
LONG_US = 200_000.0  # longer copies are slow because of the disk, and hardly slow down compute

T = TypeVar("T")


def measure_tiers(
    machine: Machine, tiers: Sequence[str], device: torch.device, places: Places,
    sizes: Sequence[int] = (USUAL_SIZES,), wire: str = "", room: int | None = None,
) -> Machine:  # fmt: skip
    """Return the machine with its links to all of these tiers, the nearest first; arguments as for `measure_links`."""
    measured = list[Machine]()
    for tier in tiers:
        location = places.at(tier)
        cap = location.cap if isinstance(location, PinnedBufferAllocator) else None
        space = None if isinstance(location, BufferAllocator) else location
        measured.append(measure_links(machine, tier, device, space, sizes, "" if measured else wire, cap, room))
    if not measured:
        return measure_links(machine, None, device, None)
    return replace(measured[0], behind=tuple(Tier(each.tier, each.link) for each in measured[1:]))


def measure_links(
    machine: Machine, tier: str | None, device: torch.device, space: Space, sizes: Sequence[int] = (USUAL_SIZES,),
    wire: str = "", pinned: int | None = None, room: int | None = None,
) -> Machine:  # fmt: skip
    """Return the machine with its links to one tier, measured at first use.

    A link has one rate, although small copies are slower. It is right for the sum of `sizes`, too high for the smallest
    and too low for the largest.

    Args:
        sizes: bytes of the values that may be offloaded.
        wire: dtype to which values may be cast for the copy; empty for none.
        pinned: bytes of host memory that may be pinned; None for the default.
        room: bytes of device memory that measuring may use.
    """
    if device.type == "cpu":
        reference_op.least_us()  # beside the prices, for a later step that is off its forecast
    if tier is None:
        return machine
    sizes = sizes or (USUAL_SIZES,)
    if room is not None and device.type == "cpu":
        room //= 2  # the other half is for Python's objects of the step
    links = measure_files(space, room) if device.type == "cpu" else measure_host(device, room)
    out, back = links
    link = replace(machine.link, out=out.rate(sizes), back=back.rate(sizes))
    machine = replace(machine, tier=tier)
    if wire:
        out, back = measure_casts(device, room)
        machine = replace(machine, cast=Cast(wire, out.rate(sizes), back.rate(sizes)))
    if device.type != "cpu":  # less the padding between slots
        cap = cap_nbytes() if pinned is None else pinned
        return replace(machine, link=replace(link, capacity=cap - cap // 128))
    files = file_space(space)
    overhead = measure_copy_overhead(files, links, room)
    link = replace(link, call_us=overhead.us_per_copy, us_per_byte=overhead.us_per_byte, half_duplex=True)
    staging = 0 if files.is_memory else STAGING
    return replace(machine, link=replace(link, staging=staging, capacity=files.capacity))


@dataclass(frozen=True)
class CopyOverhead:
    """Microseconds of compute that a copy costs, and each of its bytes."""

    us_per_copy: float = 0.0
    us_per_byte: float = 0.0


GUESSED = CopyOverhead(200.0, 2e-4)  # about that of two cores
_known: dict[str, CopyOverhead] = {}


def measure_copy_overhead(space: Space, links: Links, room: int | None = None) -> CopyOverhead:
    """Return the overhead of copies between memory and files in a folder, or in host memory.

    Args:
        links: the speed of these copies.
        room: bytes of memory that measuring may use; with less memory, fewer copies are timed. One may take twice as
            much; if that is not enough, the overhead is guessed.
    """
    space = file_space(space)
    if space.free_nbytes < 2 * NBYTES * COPIES:
        return CopyOverhead()  # unknown while the disk is nearly full
    beside = STAGING + MATRICES + NBYTES  # and their source
    if room is not None and 2 * room < beside + NBYTES:
        return GUESSED
    copies = COPIES if room is None else max(1, min(COPIES, (room - beside) // NBYTES))
    key = f"copy overhead {copies} x {NBYTES} {space.description} {kernel_modes()} {environment_key(CPU)}"
    return measure_once(
        _known, key, lambda: _measure(space, links, copies), lambda cached: CopyOverhead(*cached), astuple
    )


def _measure(space: FileSpace, links: Links, copies: int) -> CopyOverhead:
    tier = FileTier([NBYTES] * copies, space)
    lease = tier.lease()
    data = random_bytes(NBYTES)
    with torch.no_grad(), torch._C._DisableAutocast(), op_context(lease, {}):
        us_per_copy = min(_copy_us(data, slot) / 2 for slot in range(copies))
        us_per_byte = _us_per_byte(lease, data, links, copies)
    lease.release()
    tier.close()
    return CopyOverhead(round(us_per_copy, 1), us_per_byte)


def _copy_us(data: Tensor, slot: int) -> float:
    """Return the time of the computing thread for an offload and a reload, as ops of a step."""
    ops, loop = torch.ops.memgraph, _ComputeLoop()
    ticket = loop.run(partial(ops.offload.default, data, slot))
    loop.run(partial(ops.free.default, ticket, data, slot))
    reloaded = loop.run(partial(ops.reload.default, ticket, slot, data.shape, data.stride(), data.dtype, CPU))
    loop.run(partial(ops.wait.default, reloaded, slot))
    return loop.us


class _ComputeLoop:
    """Sums the processor time of this thread without waits; multiplies matrices between, as a step would."""

    def __init__(self) -> None:
        self.us = 0.0
        self.multiply = _matmul()

    def run(self, work: Callable[[], T]) -> T:
        self.multiply()
        begin = time.thread_time()
        result = work()
        self.us += (time.thread_time() - begin) * 1e6
        return result


def _us_per_byte(lease: FileLease, data: Tensor, links: Links, copies: int) -> float:
    """Return the microseconds by which each copied byte slows down compute that outlasts the copies.

    The processor time of the copying threads is an upper limit, which excludes the load of other processes.
    """
    out_us, back_us = (copies * link.us(NBYTES) for link in links)
    if max(out_us, back_us) > LONG_US:
        return 0.0
    buffers = [torch.empty_like(data) for _ in range(copies)]
    work = _matmul()
    unit = shortest_us(work, CPU)
    clock_us, processor_us = [], []
    for _ in range(TRIES):
        for us, start, end in ((out_us, lease.offload, lease.free), (back_us, lease.reload, lease.wait)):
            times = math.ceil(2 * us / unit)
            alone = _timed_us(work, times)
            for slot in range(copies):
                start(slot, buffers[slot])
            beside = _timed_us(work, times)
            for slot in range(copies):
                end(slot)
            clock_us.append(beside[0] - alone[0])
            processor_us.append(beside[1] - alone[1])
    return max(0.0, min(statistics.median(clock_us), statistics.median(processor_us))) / (copies * NBYTES)


def _timed_us(work: Callable[[], object], times: int) -> tuple[float, float]:
    """Repeat `work`, and return the microseconds of the clock and of all processors of this process."""
    begin = time.process_time()
    us = timed_us(partial(repeats, work, times), CPU)[1]
    return us, (time.process_time() - begin) * 1e6


def _matmul() -> Callable[[], Tensor]:
    matrix = torch.full((SIDE, SIDE), 0.5)
    return partial(torch.mm, matrix, matrix)
