"""Run work in another thread, where the caller's profiler does not see it.

    with torch.profiler.profile():
        model(x)      ->   the first call prices ops in a second thread, and the profile does not show them

torch has one profiler for the whole process, and a second one would end it. Its legacy profiler works for each thread.
It reports the size of each block that is allocated or freed, but not the address.
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
    """Return True if a torch profiler is running in any thread."""
    return _profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


def is_unprofiled() -> bool:
    """Return True in a thread that `run_unprofiled` started."""
    return getattr(_here, "apart", False)


def run_unprofiled(work: Callable[[], T]) -> T:
    """Call `work`, in a thread of its own if a profiler is running."""
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

    thread = threading.Thread(target=run, name="memgraph-unprofiled", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def block_sizes(work: Callable[[], T]) -> tuple[T, list[int]]:
    """Call `work`, and return its result and the bytes of each block it allocated (> 0) or freed (< 0).

    The work must not free older blocks, which can't be told from its own.
    """
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        result = work()
    finally:
        events = _disable_profiler_legacy()
    seen = [event for thread in events for event in thread if str(event.kind()) == "memory_alloc"]
    return result, [event.cpu_memory_usage() for event in seen]
