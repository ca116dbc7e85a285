"""The speed of this machine now, beside that when ops were priced: a small reference op is timed again.

    slower()  ->  0.28: the op takes 28 % longer now; other work has cores, caches or memory of this machine

Some of its time multiplies matrices in the caches, the rest reads memory: a file in the system's page cache, by a small
buffer, so that neither a budget nor a meter of pages is touched.  Here the median counts, and waits for a core are in
it, while the least time is kept: what the machine can do.
"""

from __future__ import annotations

import os
import statistics
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .device import CPU
from .measurement_cache import measure_once
from .setting import environment_key
from .timer import LIBRARY, repeats, timed_us

SIDE, PRODUCTS = 128, 20  # of the matrices, and how often they are multiplied: some 1.5 ms on one core
BUFFER, READS = 1 << 18, 48  # bytes of the buffer, and how often it is filled: 12 MB, more than most caches
NBYTES = BUFFER + 2 * 4 * SIDE**2  # of memory, while it runs
RUNS = 5
_known: dict[str, float] = {}


def least_us() -> float:
    """Return the least microseconds of the reference op, measured at first use with these threads, and cached."""
    key = f"reference op {torch.get_num_threads()} threads {environment_key(CPU)}"
    return measure_once(_known, key, lambda: round(min(_times_us()), 1), float, float)


def slower() -> float:
    """Return how much longer the reference op takes now than at best: 0.1 is 10 %; takes some 20 ms."""
    least = least_us()
    return statistics.median(_times_us()) / least - 1


def _times_us() -> list[float]:
    matrix = torch.full((SIDE, SIDE), 0.5)
    path = LIBRARY if LIBRARY.is_file() else Path(torch.__file__)
    with torch.no_grad(), torch._C._DisableAutocast(), path.open("rb", buffering=0) as file:
        run = partial(_run, matrix, file.fileno(), bytearray(BUFFER))
        run()
        return [timed_us(run, CPU)[1] for _ in range(RUNS)]


def _run(matrix: Tensor, file: int, buffer: bytearray) -> None:
    repeats(lambda: torch.mm(matrix, matrix), PRODUCTS)
    for place in range(READS):
        os.preadv(file, [buffer], place * BUFFER)
