"""Work in a thread of its own where a profiler is running: there it does not see the work, and so is in nobody's way.

    with torch.profiler.profile():
        model(x)      ->   the first call prices ops elsewhere; the trace shows none of these, and their times are real

torch's profiler is one for the whole process, and a second one would end it.  The older one, which it still has beside
it, is one for each thread, and says how large each block is that comes or goes, though not where it lies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch.autograd.profiler
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

T = TypeVar("T")

_here = threading.local()


def is_profiled() -> bool:
    """Return whether a profiler of torch's is running, in this thread or in another one."""
    return _profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


def is_unprofiled() -> bool:
    """Return whether this is a thread that `apart` has started."""
    return getattr(_here, "apart", False)


def run_unprofiled(work: Callable[[], T]) -> T:
    """Return what the work returns, or raise what it raises; where a profiler is running it has a thread of its own."""
    if not is_profiled() or is_unprofiled():
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        _here.apart = True
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="memgraph-apart", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def block_sizes(work: Callable[[], T]) -> tuple[T, list[int]]:
    """Return what the work returns, and the bytes of each block that came (> 0) or went (< 0) in this thread.

    The work must not free blocks that came before it: these can't be told from its own.
    """
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        result = work()
    finally:
        events = _disable_profiler_legacy()
    seen = [event for thread in events for event in thread if str(event.kind()) == "memory_alloc"]
    return result, [event.cpu_memory_usage() for event in seen]
