"""Time an op of a GPU whose operands are in memory, and not in the L2 cache.

    run, run, run, ...                ->   7 us for relu bf16[4, 1024, 1600]: 26 MB, which the cache holds
    flush, run, flush, run, ...       ->   the time of reading and writing 26 MB

An op that runs many times on the same tensors finds them in the cache. In a step other ops have run since most of them
were written. So a buffer of twice the cache is written before each run. Events around the run leave that out, and it
takes longer than to launch the run, so that the device does not wait for the host. The buffer exists after the op's
workspace was measured, takes only what the budget has left beside the op, and is freed at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from ..system.timer import ENOUGH_US
from .step_timer import between_us, now

RUNS = 9
FLUSHED = 2  # bytes that are written, over those of the cache
LARGE = 4  # bytes of an op's tensors, over those of the cache, from which on hardly any are left of the run before


def cold_us(run: Callable[[], object], warm_us: float, device: torch.device, nbytes: int, room: int) -> float:
    """Return the median time of a run with cold operands, at least `warm_us`, the time of one behind the other.

    It is `warm_us` where the op's tensors are much larger than the cache, the run takes long, or there is no room.

    Args:
        nbytes: of the operands and results.
        room: bytes that the buffer may take; a cache that can't be overwritten whole is not flushed.
    """
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    runs = int(min(RUNS, ENOUGH_US / max(warm_us, 1.0)))
    if not runs or not cache or nbytes >= LARGE * cache or room < cache:
        return warm_us
    try:
        buffer = torch.empty(min(FLUSHED * cache, room), dtype=torch.uint8, device=device)
        marks = [_marks(run, buffer, device) for _ in range(runs)]
    except torch.OutOfMemoryError:  # the allocator has no such block, or the op's workspace does not fit beside it
        return warm_us
    return max(warm_us, round(statistics.median(between_us(*each) for each in marks), 1))


def _marks(run: Callable[[], object], buffer: Tensor, device: torch.device) -> tuple[object, object]:
    """Queue a flush and a run, and return the events around the run."""
    buffer.zero_()
    begin = now(device)
    run()
    return begin, now(device)
