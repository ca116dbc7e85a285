"""Measure what a piece of work allocates: its highest bytes above the start, and those left at the end.

    loss, allocation = measured(lambda: step(batch))
    allocation.peak + resident_bytes(everything that was there before)    # the most that the device held

On the CPU, torch's profiler reports each block as it comes and goes, temporaries inside an op included. It sees only
the thread that does the work, and it does not know how large a block is that came before it was started: a later free
of that block goes unreported, or carries the size of what once lay there. So only blocks that the work itself
allocated are counted. A measurement is exact when the work frees nothing older, and too high, never too low, when it
does. On a GPU the caching allocator counts for itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _ExtraFields_Allocation, _ProfilerEvent
from torch.autograd.profiler import profile, record_function

from ..storage.mapped_storage import is_offloaded
from ..system.locks import PLANNING_LOCK
from ..system.profiler_thread import block_sizes, is_profiled, is_unprofiled

T = TypeVar("T")
Block = tuple[int, int]
ERROR = 2  # a level of torch's C++ log
GIVEN = -1  # no block has this address
GONE = "memgraph gone "  # begins the name of an event that says how many bytes of what was given have gone


@dataclass(frozen=True)
class Allocation:
    """Bytes above the start of some work: the most there were, and what was left at its end.

    On a GPU also the most bytes of all blocks that the allocator had given out, and of all memory that it held: it may
    give a larger block than was asked for, and holds what is free between them.
    """

    peak: int
    net: int
    blocks: int = 0
    held: int = 0


def measure_peak(work: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, Allocation | None]:
    """What the work returns, and what it allocated; None where a profiler of the caller's is in the way.

    Two profilers can't run at once: a second one silently ends the first.  In a thread that `apart` has started it is
    in nobody's way; there the work must not free what was there before it.
    """
    if is_unprofiled() and torch.device(device).type == "cpu":
        result, sizes = block_sizes(work)
        sums = [0, *accumulate(sizes)]
        return result, Allocation(max(sums), sums[-1])
    meter = meter_of(torch.device(device))
    with meter.window():
        result = work()
    return result, meter.allocated()


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the tensors hold in memory; a storage that several share counts once, one that lives on disk not."""
    # The storages are kept, or the address of one that dies could be that of the next.
    storages = {
        storage._cdata: storage
        for storage in (tensor.untyped_storage() for tensor in tensors if not is_offloaded(tensor))
    }
    return sum(storage.nbytes() for storage in storages.values())


class Meter(Protocol):
    """Measures work that is done in several pieces, each in a `window()`; what happens between them is not seen."""

    def window(self, given: int = 0) -> AbstractContextManager[None]:
        """A piece of the work; `given` bytes lie there for it, that came since the last; fewer than 0 have gone."""
        ...

    def gone(self, nbytes: int) -> None:
        """So many bytes that a window was given have gone; a meter may not see that itself."""
        ...

    def allocated(self) -> Allocation | None:
        """What all windows allocated; None where a profiler of the caller's was in the way."""
        ...


def meter_of(device: torch.device) -> Meter:
    """A meter of what work allocates on a device.

    Raises:
        ValueError: it is no CPU and no CUDA device.
    """
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type != "cpu":
        raise ValueError(f"cannot measure memory on {device}: wanted 'cpu' or 'cuda'")
    return CpuMeter()


class CpuMeter:
    """The blocks that torch's profiler sees.

    A profiler has to be stopped where it was started: one that is stopped within a backward is running again after it.
    """

    def __init__(self) -> None:
        self._seen: list[Block] = []
        self._whole = True

    @contextmanager
    def window(self, given: int = 0) -> Iterator[None]:
        with PLANNING_LOCK:
            yield from self._window(given)

    def _window(self, given: int) -> Iterator[None]:
        if is_profiled():
            self._whole = False
            yield
            return
        with _quiet(), (profiler := profile(use_kineto=True, profile_memory=True)):
            yield
            whole = _profiler_enabled()  # not if the work ran a profiler of its own
        results = profiler.kineto_results
        if not whole or results is None:
            self._whole = False
        elif self._whole:
            seen = _blocks(results.experimental_event_tree())
            left = given + sum(nbytes for address, nbytes in seen if address == GIVEN)
            self._seen += [(GIVEN, given), *seen, (GIVEN, -left)]

    def gone(self, nbytes: int) -> None:
        with record_function(f"{GONE}{nbytes}"):
            pass

    def allocated(self) -> Allocation | None:
        return _account(self._seen) if self._whole else None


class CudaMeter:
    """The caching allocator's own counters, all threads included.  Not yet run on a GPU.

    What was asked for is counted: how much larger a block is that happens to be free depends on what lay there before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak = self._net = self._blocks = self._held = 0
        counts = torch.cuda.get_allocator_backend() == "native"  # the other one does not know what was asked for
        self._asked = "requested_bytes" if counts else "allocated_bytes"

    @contextmanager
    def window(self, given: int = 0) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self.device)
        start, _ = self._stats(self._asked)
        yield
        # The allocator counts where the host asks for bytes: nothing has to be waited for.
        end, peak = self._stats(self._asked)
        self._peak = max(self._peak, self._net + given + peak - start)
        self._net += end - start
        self._blocks = max(self._blocks, self._stats("allocated_bytes")[1])
        self._held = max(self._held, self._stats("reserved_bytes")[1])

    def gone(self, nbytes: int) -> None:
        """The allocator counts that itself."""

    def allocated(self) -> Allocation | None:
        return Allocation(self._peak, self._net, self._blocks, self._held)

    def _stats(self, kind: str) -> tuple[int, int]:
        """Bytes now, and the most since the beginning."""
        found = torch.cuda.memory_stats(self.device)
        return found.get(f"{kind}.all.current", 0), found.get(f"{kind}.all.peak", 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's log off stderr, unless a level was asked for. It reads the level once, at its first start."""
    with _without_warnings():
        if "KINETO_LOG_LEVEL" in os.environ:
            yield
            return
        os.environ["KINETO_LOG_LEVEL"] = "99"
        try:
            yield
        finally:
            os.environ.pop("KINETO_LOG_LEVEL", None)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep torch's C++ log from warning of blocks that came before the profiler, unless a level was asked for."""
    level = _log_level()
    if level is None or level.value >= ERROR or "TORCH_CPP_LOG_LEVEL" in os.environ:
        yield
        return
    before, level.value = level.value, ERROR
    try:
        yield
    finally:
        level.value = before


@cache
def _log_level() -> ctypes.c_int | None:
    """Return the level of torch's C++ log; None where torch was built with another log."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def _blocks(roots: Iterable[_ProfilerEvent]) -> list[Block]:
    """Address and bytes of each block that came (> 0) or went (< 0), in order of time."""
    found, todo = [], list(roots)
    while todo:
        event = todo.pop()
        todo += event.children
        block = event.extra_fields
        if event.name.startswith(GONE):
            found.append((event.start_time_ns, GIVEN, -int(event.name.removeprefix(GONE))))
        elif isinstance(block, _ExtraFields_Allocation) and block.device.type == "cpu":
            found.append((event.start_time_ns, block.ptr, block.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(found, key=lambda seen: seen[0])]


def _account(blocks: Iterable[Block]) -> Allocation:
    live: dict[int, int] = {}
    peak = now = 0
    for address, nbytes in blocks:
        if address == GIVEN:
            now += nbytes
        elif nbytes > 0:
            live[address] = nbytes
            now += nbytes
        else:
            now -= live.pop(address, 0)
        peak = max(peak, now)
    return Allocation(peak, now)
