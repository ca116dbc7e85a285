"""How long a piece of work takes.

shortest(lambda: torch.mm(a, b), cpu)         ->   the microseconds of the fastest of some runs
shortest(lambda: a.relu(), cpu, cool(cpu))    ->   the same, with `a` in memory and not in a cache at each begin
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

ENOUGH_US = 30_000.0  # work is done again until this much time has gone into it: some slices of a busy machine's time,
REPEATS = 5  # but not more often
CACHE = 32 << 20  # bytes that are read to have nothing else in a cache


def shortest(run: Callable[[], object], device: torch.device, before: Callable[[], object] = int) -> float:
    """The least time of one run or more, each after `before`, which is not timed.

    The work has been run before, because a first run also sets up its kernels.

    The least, and not the median: whatever else the machine does only adds to a time, and plans are chosen by how the
    ops' times relate.  What ops take beside their neighbours, the step itself tells (`replan.py`).
    """
    least, spent, runs = float("inf"), 0.0, 0
    while not runs or (runs < REPEATS and spent < ENOUGH_US):
        before()
        _, us = timed(run, device)
        least, spent, runs = min(least, us), spent + us, runs + 1
    return round(least, 1)


def cool(device: torch.device) -> Callable[[], object]:
    """What empties the caches of a CPU; as long as it is kept, so is the memory that it reads.

    A value that a step reads was mostly made long before.
    """
    return torch.zeros(CACHE // 4).sum if device.type == "cpu" else int


def timed(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """A result, and the microseconds that it took."""
    synchronize = torch.get_device_module(device).synchronize if device.type != "cpu" else lambda: None
    synchronize()
    begin = time.perf_counter()
    result = run()
    synchronize()
    return result, (time.perf_counter() - begin) * 1e6
