"""What compute loses to copies: for each to be begun and seen to its end, and for each of its bytes while they move.

    disk_toll("/var/tmp", links)  ->  60 us a copy, 0.00001 us a byte

Who copies are threads of this process: they take the interpreter when they are told, and cores where all of these
compute.  Measured at first use, with as many threads as compute now, and kept with the costs.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..graph.ops import op_context
from ..guards.signature import kernel_modes
from ..storage.disk_tier import DiskLease, DiskTier
from ..storage.io_threads import STAGING
from ..storage.spill_file import available_nbytes, mount_description, spill_folder
from ..system.device import CPU
from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import repeats, shortest_us, timed_us
from .link_bandwidth import Links, random_bytes

NBYTES, COPIES = 1 << 20, 8  # of the copies that are watched
TRIES = 5
SIDE = 320  # of the matrices that are multiplied meanwhile, and between
LONG_US = 200_000.0  # if the copies take longer than this, the disk is what is slow, and compute hardly notices them

T = TypeVar("T")


@dataclass(frozen=True)
class CopyOverhead:
    """Microseconds of compute: of each copy, and of each byte."""

    call: float = 0.0
    drag: float = 0.0


_known: dict[str, CopyOverhead] = {}


def measure_copy_overhead(folder: str | os.PathLike[str] | None, links: Links, room: int | None = None) -> CopyOverhead:
    """The toll of copies to the file system of `folder` and back, whose speed is known.

    Args:
        room: the bytes of memory that measuring may take: fewer copies are watched in less.
    """
    there = spill_folder(folder)
    if available_nbytes(there) < 2 * NBYTES * COPIES:
        return CopyOverhead()  # unknown, as long as the disk is nearly full
    copies = COPIES if room is None else max(1, min(COPIES, (room - STAGING) // NBYTES - 1))
    key = f"toll {copies} x {NBYTES} {mount_description(there)} {kernel_modes()} {environment_key(CPU)}"
    return measure_once(
        _known, key, lambda: _measure(there, links, copies), lambda found: CopyOverhead(*found), astuple
    )


def _measure(folder: Path, links: Links, copies: int) -> CopyOverhead:
    tier = DiskTier([NBYTES] * copies, folder)
    lease = tier.lease()
    sent = random_bytes(NBYTES)
    with torch.no_grad(), torch._C._DisableAutocast(), op_context(lease, {}):
        call = min(_trip_us(sent, slot) / 2 for slot in range(copies))
        drag = _drag(lease, sent, links, copies)
    lease.release()
    tier.close()
    return CopyOverhead(round(call, 1), drag)


def _trip_us(sent: Tensor, slot: int) -> float:
    """What a copy out and one back take of the thread that computes, as the ops of a step."""
    ops, processor = torch.ops.memgraph, _ComputeLoop()
    ticket = processor.run(partial(ops.offload.default, sent, slot))
    processor.run(partial(ops.free.default, ticket, sent, slot))
    back = processor.run(partial(ops.reload.default, ticket, slot, sent.shape, sent.stride(), sent.dtype, CPU))
    processor.run(partial(ops.wait.default, back, slot))
    return processor.us


class _ComputeLoop:
    """Sums the time that this thread's processor takes for work: not what it waits, and each time after something else,
    because a step computes between."""

    def __init__(self) -> None:
        self.us = 0.0
        self.between = _matmul()

    def run(self, work: Callable[[], T]) -> T:
        self.between()
        begin = time.thread_time()
        result = work()
        self.us += (time.thread_time() - begin) * 1e6
        return result


def _drag(lease: DiskLease, sent: Tensor, links: Links, copies: int) -> float:
    """How much longer the same work takes beside copies that end before it does, for each of their bytes.

    At most what the copies' own threads take of the processors: what other processes do meanwhile is none of theirs.
    """
    out_us, back_us = (copies * link.us(NBYTES) for link in links)
    if max(out_us, back_us) > LONG_US:
        return 0.0
    there = [torch.empty_like(sent) for _ in range(copies)]
    work = _matmul()
    unit = shortest_us(work, CPU)
    lost, own = [], []
    for _ in range(TRIES):
        for us, start, end in ((out_us, lease.offload, lease.free), (back_us, lease.reload, lease.wait)):
            times = math.ceil(2 * us / unit)
            alone = _spent(work, times)
            for slot in range(copies):
                start(slot, there[slot])
            beside = _spent(work, times)
            for slot in range(copies):
                end(slot)
            lost.append(beside[0] - alone[0])
            own.append(beside[1] - alone[1])
    return max(0.0, min(statistics.median(lost), statistics.median(own))) / (copies * NBYTES)


def _spent(work: Callable[[], object], times: int) -> tuple[float, float]:
    """The microseconds of doing `work` so often: of the clock, and of all processors of this process."""
    begin = time.process_time()
    us = timed_us(partial(repeats, work, times), CPU)[1]
    return us, (time.process_time() - begin) * 1e6


def _matmul() -> Callable[[], Tensor]:
    matrix = torch.full((SIDE, SIDE), 0.5)
    return partial(torch.mm, matrix, matrix)
