"""Time a function.

shortest_us(lambda: torch.mm(a, b), cpu)                 ->   microseconds of the fastest of some runs
shortest_us(lambda: a.relu(), cpu, flush_caches(cpu))    ->   the same, with `a` in memory and not in a cache
shortest_us(lambda: b.relu(), cuda)                      ->   the time of each of several queued runs
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .disturbance import waited_us

T = TypeVar("T")

ENOUGH_US = 30_000.0  # microseconds after which a function is not run again: some slices of a busy machine's time
REPEATS = 5  # most runs, or batches of runs
AGREED = 1.03  # the ratio of two times below which neither run was disturbed, so that no other one is needed
LINE = 20  # most runs that are queued on a GPU before they are waited for
LEAST_SHARE = 0.01  # of the clock's time, where this thread waited for a core in the rest of it
CACHE = 32 << 20  # bytes that are read to flush the caches
LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def shortest_us(
    run: Callable[[], object], device: torch.device, before: Callable[[], object] = int, most: int = REPEATS,
    first_us: float = 0.0,
) -> float:  # fmt: skip
    """Return the least time of at most `most` runs, each after `before`, which is not timed.

    `run` must have been called before, because a first call also sets up its kernels. Time in which this thread waited
    for a core is left out. The least time is taken, not the median, because other work of the machine only adds to a
    time; two runs that agree on it are enough. `replan.py` corrects times with those of real steps.

    Args:
        first_us: of that call, if a step's run may take as long: one run that agrees with it is enough.
    """
    least, second, spent, runs = float("inf"), float("inf"), 0.0, 0
    line = _line(run, device)
    while not runs or (runs < most and spent < ENOUGH_US and not _agree(least, second)):
        before()
        waited = waited_us()
        _, us = timed_us(partial(repeats, run, line), device)
        # Other work had this thread's core meanwhile; the rest of it can't be less than nothing by much.
        us = max(us - (waited_us() - waited), us * LEAST_SHARE)
        least, second = sorted((least, second, us / line))[:2]
        spent, runs = spent + us, runs + 1
        if first_us and _agree(least, first_us):
            break
    return round(least, 1)


def _agree(one_us: float, other_us: float) -> bool:
    return max(one_us, other_us) <= AGREED * min(one_us, other_us)


def _line(run: Callable[[], object], device: torch.device) -> int:
    """Return how many runs to queue at once, because a launch and a wait take longer than a short kernel."""
    if device.type == "cpu":
        return 1
    _, us = timed_us(run, device)
    return max(1, min(LINE, int(ENOUGH_US / REPEATS / us)))


def repeats(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def flush_caches(device: torch.device) -> Callable[[], object]:
    """Return a function that flushes the caches of a CPU, because a step mostly reads values that are not cached.

    It reads a file's pages, which are not part of the memory that a budget limits; nothing if no file can be opened.
    """
    if device.type != "cpu":
        return int
    try:
        return _uncached_bytes().sum
    except RuntimeError:
        return int


def _uncached_bytes() -> Tensor:
    """Map torch's own library, which is in the system's page cache; zeros if there is no such file."""
    if LIBRARY.is_file() and LIBRARY.stat().st_size >= CACHE:
        return torch.from_file(str(LIBRARY), shared=False, size=CACHE // 8, dtype=torch.int64)
    return torch.zeros(CACHE // 8, dtype=torch.int64)


def timed_us(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Call `run`, and return its result and its microseconds."""
    synchronize = partial(torch.get_device_module(device).synchronize, device) if device.type != "cpu" else int
    synchronize()
    begin = time.perf_counter()
    result = run()
    synchronize()
    return result, (time.perf_counter() - begin) * 1e6
