"""The speed of this machine now, beside that when ops were priced: a small reference op is timed again.

    slower()  ->  0.28: the op takes 28 % longer now; other work has cores, caches or memory of this machine

It computes checksums in the caches, and reads a file of the system's page cache by a small buffer, so that it takes no
tensor's memory and maps no page.  Here the mean counts, with all waits for a core, while the least time is kept:
what the machine can do.
"""

from __future__ import annotations

import os
import statistics
import zlib
from functools import partial
from pathlib import Path

import torch

from .device import CPU
from .measurement_cache import measure_once
from .setting import environment_key
from .timer import LIBRARY, timed_us

BUFFER = 1 << 16  # bytes
SUMS, READS = 96, 192  # of a full buffer: some 1.5 ms each; what is read is more than most caches hold
RUNS = 10
_known: dict[str, float] = {}


def least_us() -> float:
    """Return the least microseconds of the reference op, measured at first use, and cached."""
    return measure_once(
        _known, f"reference op {SUMS} {READS} {environment_key(CPU)}", lambda: round(min(_times_us()), 1), float, float
    )


def slower() -> float:
    """Return how much longer the reference op takes now than at best: 0.1 is 10 %; takes some 30 ms."""
    least = least_us()
    return statistics.mean(_times_us()) / least - 1


def _times_us() -> list[float]:
    path = LIBRARY if LIBRARY.is_file() else Path(torch.__file__)
    with path.open("rb", buffering=0) as file:
        run = partial(_run, file.fileno(), bytearray(BUFFER))
        run()
        return [timed_us(run, CPU)[1] for _ in range(RUNS)]


def _run(file: int, buffer: bytearray) -> None:
    for _ in range(SUMS):
        zlib.crc32(buffer)
    for place in range(READS):
        os.preadv(file, [buffer], place * BUFFER)
