"""Measure what a piece of work allocates: its highest bytes above the start, and those left at the end.

    loss, allocation = measured(lambda: step(batch))
    allocation.peak + resident_bytes(everything that was there before)    # the most that the device held

On the CPU, torch's profiler reports each block as it comes and goes, temporaries inside an op included. It sees only
the thread that does the work, and it does not know how large a block is that came before it was started: a later free
of that block goes unreported, or carries the size of what once lay there. So only blocks that the work itself
allocated are counted. A measurement is exact when the work frees nothing older, and too high, never too low, when it
does.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _ExtraFields_Allocation, _ProfilerEvent
from torch.autograd.profiler import profile

T = TypeVar("T")


@dataclass(frozen=True)
class Allocation:
    """Bytes above the start of some work: the most there were, and what was left at its end."""

    peak: int
    net: int


@dataclass(frozen=True)
class Window:
    """When own work began and ended, in nanoseconds of the clock, and bytes that were allocated for it before."""

    begin: int
    end: int
    given: int


def measured(work: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, Allocation | None]:
    """What the work returns, and what it allocated; None where a profiler of the caller's is in the way.

    Two profilers can't run at once: a second one silently ends the first.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _on_cuda(work, device)
    if device.type != "cpu":
        raise ValueError(f"cannot measure memory on {device}: wanted 'cpu' or 'cuda'")
    if _profiler_enabled():
        return work(), None
    return _on_cpu(work)


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the tensors hold; a storage that several share counts once."""
    # The storages are kept, or the address of one that dies could be that of the next.
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


class Meter:
    """The same over a stretch of a program: `start()`, any number of `window()`s of own work, `stop()`.

    What is allocated outside of the windows, and is still there when the next one opens, is the caller's: it is left out
    of the peak, but for the bytes that `window` is told to count.
    """

    def __init__(self) -> None:
        self._profile = profile(use_kineto=True, profile_memory=True)
        self._windows: list[Window] = []

    @staticmethod
    def available() -> bool:
        """Whether no profiler is in the way."""
        return not _profiler_enabled()

    def start(self) -> None:
        with _quiet():
            self._profile.__enter__()

    @contextmanager
    def window(self, given: int = 0) -> Iterator[None]:
        """Own work; `given` bytes, allocated since the last window closed, are counted."""
        begin = time.time_ns()
        try:
            yield
        finally:
            self._windows.append(Window(begin, time.time_ns(), given))

    def stop(self) -> Allocation | None:
        """What the windows allocated; None if a profiler of the caller's ended this one."""
        whole = _profiler_enabled()
        self._profile.__exit__(None, None, None)
        if not whole or self._profile.kineto_results is None:
            return None
        return _account(_blocks(self._profile.kineto_results.experimental_event_tree()), self._windows)


def _on_cpu(work: Callable[[], T]) -> tuple[T, Allocation | None]:
    meter = Meter()
    meter.start()
    try:
        with meter.window():
            result = work()
    finally:
        allocation = meter.stop()
    return result, allocation


def _on_cuda(work: Callable[[], T], device: torch.device) -> tuple[T, Allocation]:
    """The same from the caching allocator's own counters, all threads included. Not yet run on a GPU."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    result = work()
    torch.cuda.synchronize(device)
    peak, end = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return result, Allocation(peak - start, end - start)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's log off stderr, unless a level was asked for. It reads the level once, at its first start."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        yield
    finally:
        os.environ.pop("KINETO_LOG_LEVEL", None)


def _blocks(roots: Iterable[_ProfilerEvent]) -> list[tuple[int, int, int]]:
    """Time, address and bytes of each block that came (> 0) or went (< 0), in order of time."""
    found, todo = [], list(roots)
    while todo:
        event = todo.pop()
        todo += event.children
        block = event.extra_fields
        if isinstance(block, _ExtraFields_Allocation) and block.device.type == "cpu":
            found.append((event.start_time_ns, block.ptr, block.alloc_size))
    return sorted(found, key=lambda seen: seen[0])


def _account(blocks: Sequence[tuple[int, int, int]], windows: Iterable[Window]) -> Allocation:
    """The peak within the windows, less what came between them and was not given to them."""
    times, sums = [when for when, _, _ in blocks], [0, *_running(blocks)]
    peak = left = foreign = 0
    for window in windows:
        begin, end = bisect.bisect_left(times, window.begin), bisect.bisect_left(times, window.end)
        foreign += max(0, sums[begin] - left - window.given)
        peak = max(peak, max(sums[begin : end + 1]) - foreign)
        left = sums[end]
    return Allocation(peak, left - foreign)


def _running(blocks: Iterable[tuple[int, int, int]]) -> Iterator[int]:
    """The bytes that live after each block came or went; blocks that never came, count nothing when they go."""
    live: dict[int, int] = {}
    now = 0
    for _, address, nbytes in blocks:
        if nbytes > 0:
            live[address] = nbytes
        now += nbytes if nbytes > 0 else -live.pop(address, 0)
        yield now
