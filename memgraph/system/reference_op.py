"""How fast this machine is now, beside its speed when ops were priced: a small reference op is timed again.

    slower()  ->  0.28: the op takes 28 % longer now; other work has cores, caches or memory of this machine

A quarter of its time multiplies matrices in the caches, the rest reads memory: pages of a file, so that no budget is
touched.  Here the median counts and waits for a core are in it, while the least time is kept: what the machine can do.
"""

from __future__ import annotations

import statistics

import torch

from .device import CPU
from .measurement_cache import measure_once
from .setting import environment_key
from .timer import repeats, timed_us, uncached_bytes

SIDE, PRODUCTS = 128, 20  # of the matrices, and how often they are multiplied: some 1.5 ms on one core
RUNS = 5
_known: dict[str, float] = {}


def least_us() -> float:
    """Return the least microseconds of the reference op, measured at first use with these threads, and cached."""
    key = f"reference op {torch.get_num_threads()} threads {environment_key(CPU)}"
    return measure_once(_known, key, lambda: round(min(_times_us()), 1), float, float)


def slower() -> float:
    """Return how much longer the reference op takes now than at best: 0.1 is 10 %; takes some 25 ms."""
    least = least_us()
    return statistics.median(_times_us()) / least - 1


def _times_us() -> list[float]:
    matrix, pages = torch.full((SIDE, SIDE), 0.5), uncached_bytes()

    def run() -> None:
        repeats(lambda: torch.mm(matrix, matrix), PRODUCTS)
        pages.sum()

    with torch.no_grad(), torch._C._DisableAutocast():
        run()
        return [timed_us(run, CPU)[1] for _ in range(RUNS)]
