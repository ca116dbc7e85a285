"""How long a piece of work takes.

shortest(lambda: torch.mm(a, b), cpu)         ->   the microseconds of the fastest of some runs
shortest(lambda: a.relu(), cpu, cool(cpu))    ->   the same, with `a` in memory and not in a cache at each begin
shortest(lambda: b.relu(), cuda)              ->   what one takes behind another, with no launch waited for
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

ENOUGH_US = 30_000.0  # work is done again until this much time has gone into it: some slices of a busy machine's time,
REPEATS = 5  # but not more often
LINE = 20  # runs at most that a device beside the host is told of before they are waited for
CACHE = 32 << 20  # bytes that are read to have nothing else in a cache
LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def shortest_us(run: Callable[[], object], device: torch.device, before: Callable[[], object] = int) -> float:
    """The least time of one run or more, each after `before`, which is not timed.

    The work has been run before, because a first run also sets up its kernels.

    The least, and not the median: whatever else the machine does only adds to a time, and plans are chosen by how the
    ops' times relate.  What ops take beside their neighbours, the step itself tells (`replan.py`).
    """
    least, spent, runs = float("inf"), 0.0, 0
    line = _line(run, device)
    while not runs or (runs < REPEATS and spent < ENOUGH_US):
        before()
        _, us = timed_us(partial(repeats, run, line), device)
        least, spent, runs = min(least, us / line), spent + us, runs + 1
    return round(least, 1)


def _line(run: Callable[[], object], device: torch.device) -> int:
    """How often it is run at once.  To be told of work and to be waited for takes a GPU longer than short work does."""
    if device.type == "cpu":
        return 1
    _, us = timed_us(run, device)
    return max(1, min(LINE, int(ENOUGH_US / REPEATS / us)))


def repeats(run: Callable[[], object], times: int) -> None:
    """Run so many times; no result is kept."""
    for _ in range(times):
        run()


def flush_caches(device: torch.device) -> Callable[[], object]:
    """What empties the caches of a CPU: it reads much else, and takes none of the memory that a budget is about.

    A value that a step reads was mostly made long before.
    """
    return _elsewhere().sum if device.type == "cpu" else int


def _elsewhere() -> Tensor:
    """Bytes to read: those of torch's own library, which lie in the system's cache of files; zeros where it is not."""
    if LIBRARY.is_file() and LIBRARY.stat().st_size >= CACHE:
        return torch.from_file(str(LIBRARY), shared=False, size=CACHE // 8, dtype=torch.int64)
    return torch.zeros(CACHE // 8, dtype=torch.int64)


def timed_us(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """A result, and the microseconds that it took."""
    synchronize = partial(torch.get_device_module(device).synchronize, device) if device.type != "cpu" else int
    synchronize()
    begin = time.perf_counter()
    result = run()
    synchronize()
    return result, (time.perf_counter() - begin) * 1e6
