"""Measure the memory of a function: the peak above its start, and the bytes left at its end.

    loss, allocation = measure_peak(lambda: step(batch))
    allocation.peak + resident_bytes(tensors before the call)    # the peak of the device

On the CPU, torch's profiler reports each block that is allocated or freed, temporaries inside an op included. It sees
only the calling thread. It does not know the size of older blocks, so only blocks that the function itself allocated
are counted. The result is exact if the function frees no older block, and otherwise too high, never too low. On a GPU
the caching allocator has its own counters.
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
from typing import Any, Protocol, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _ExtraFields_Allocation, _ProfilerEvent
from torch.autograd.profiler import profile, record_function

from ..storage.mapped_storage import is_offloaded
from ..system import page_pool
from ..system.locks import PLANNING_LOCK
from ..system.profiler_thread import block_sizes, is_profiled, is_unprofiled
from ..tensors.pytree import flatten, tensors_of

T = TypeVar("T")
Block = tuple[int, int]  # address, and bytes allocated (> 0) or freed (< 0)
ERROR = 2  # a level of torch's C++ log
KINETO_ERROR, SILENT = 4, 99  # levels of its profiler's log: what it is set to at its first start, and above all
GIVEN, TAKEN_BACK = -1, -2  # addresses that no block has
FREED = "memgraph freed "  # prefix of an event's name; the rest is the number of given bytes that were freed


@dataclass(frozen=True)
class Allocation:
    """Bytes allocated above the start of a function.

    Attributes:
        peak, net: the peak, and the bytes left at the end.
        blocks: on a GPU, peak bytes of all blocks in use, which may be larger than requested.
        held: on a GPU, peak bytes that the allocator held, free blocks included.
    """

    peak: int
    net: int
    blocks: int = 0
    held: int = 0


def measure_peak(work: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, Allocation | None]:
    """Call `work`, and return its result and its allocation, or None if the caller runs a profiler.

    A second profiler would silently end the first. In a thread of `run_unprofiled` both can run; there the work must
    not free older blocks.
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
    """Return the bytes of the tensors in memory; shared storages count once, offloaded ones not at all."""
    # The storages stay referenced, or a new one could get the address of a freed one.
    storages = {
        storage._cdata: storage
        for storage in (tensor.untyped_storage() for tensor in tensors if not is_offloaded(tensor))
    }
    return sum(storage.nbytes() for storage in storages.values())


def argument_nbytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the resident bytes of the tensors among a call's arguments."""
    return resident_bytes(tensors_of(flatten((args, kwargs))[0]))


class Meter(Protocol):
    """Measures code in one or more `window()`s; allocations between them are not seen."""

    def window(self, given: int = 0) -> AbstractContextManager[None]:
        """Measure inside; `given` bytes were allocated since the last window, or freed if negative."""
        ...

    def freed(self, nbytes: int) -> None:
        """Record that given bytes were freed, which a meter may not see itself."""
        ...

    def allocated(self) -> Allocation | None:
        """Return the allocation of all windows; None if the caller ran a profiler."""
        ...


def meter_of(device: torch.device) -> Meter:
    """Return a meter for a device.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device.
    """
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type != "cpu":
        raise ValueError(f"cannot measure memory on {device}: wanted 'cpu' or 'cuda'")
    return CpuMeter()


class CpuMeter:
    """Counts the blocks that torch's profiler sees.

    A profiler must be stopped where it was started: one that is stopped inside a backward runs again after it.
    """

    def __init__(self) -> None:
        self._events: list[Block] = []
        self._complete = True

    @contextmanager
    def window(self, given: int = 0) -> Iterator[None]:
        with PLANNING_LOCK:
            yield from self._window(given)

    def _window(self, given: int) -> Iterator[None]:
        if is_profiled():
            self._complete = False
            yield
            return
        profiler, complete = profile(use_kineto=True, profile_memory=True), False
        with _without_warnings():
            with _quiet():
                profiler.__enter__()
            try:
                yield
            finally:
                complete = _profiler_enabled()  # False if the code inside ran its own profiler
                with _quiet():
                    profiler.__exit__(None, None, None)
        results = profiler.kineto_results
        if not complete or results is None:
            self._complete = False
        elif self._complete:
            events = _blocks(results.experimental_event_tree())
            left = given + sum(nbytes for address, nbytes in events if address == GIVEN)
            self._events += [(GIVEN, given), *events, (TAKEN_BACK, -left)]

    def freed(self, nbytes: int) -> None:
        with record_function(f"{FREED}{nbytes}"):
            pass

    def allocated(self) -> Allocation | None:
        return _account(self._events) if self._complete else None


class CudaMeter:
    """Reads the caching allocator's counters, for all threads.

    Requested bytes are counted, because the size of a block depends on which blocks were free.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak = self._net = self._blocks = self._held = 0
        counts = torch.cuda.get_allocator_backend() == "native"  # the other backend does not count requested bytes
        self._counter = "requested_bytes" if counts else "allocated_bytes"

    @contextmanager
    def window(self, given: int = 0) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self.device)
        start, _ = self._stats(self._counter)
        yield
        # The allocator counts when the host requests bytes, so no kernel has to be waited for.
        end, peak = self._stats(self._counter)
        self._peak = max(self._peak, self._net + given + peak - start)
        self._net += end - start
        self._blocks = max(self._blocks, self._stats("allocated_bytes")[1])
        self._held = max(self._held, self._stats("reserved_bytes")[1])

    def freed(self, nbytes: int) -> None:
        """Do nothing, since the allocator counts it."""

    def allocated(self) -> Allocation | None:
        return Allocation(self._peak, self._net, self._blocks, self._held)

    def _stats(self, kind: str) -> tuple[int, int]:
        """Return the current and the peak bytes of a counter."""
        stats = torch.cuda.memory_stats(self.device)
        return stats.get(f"{kind}.all.current", 0), stats.get(f"{kind}.all.peak", 0)


class OutsideMeter:
    """Measures what the caller allocates from the end of a forward to the begin of its backward, in all threads.

    The next meter ends this one: what another forward allocates is no work of the caller's.
    """

    latest: OutsideMeter | None = None

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, page_pool.begin_peak() if device.type == "cpu" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        OutsideMeter.latest = self

    @property
    def peak(self) -> int:
        """The peak above the begin in bytes; 0 where nothing counts them."""
        if self._before is None or OutsideMeter.latest is not self:
            return 0
        most = page_pool.peak() if self._device.type == "cpu" else torch.cuda.max_memory_allocated(self._device)
        return max(0, most - self._before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the lines of a profiler's start or stop off stderr, unless the caller has set a level for them.

    The first start reads the variable, and takes back what was set before; each later one asks the level.
    """
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    level = _level("libtorch_cpu.so", "_ZN9libkineto6Logger14severityLevel_E")
    before, level.value = level.value, SILENT
    os.environ["KINETO_LOG_LEVEL"] = str(SILENT)
    try:
        yield
    finally:
        os.environ.pop("KINETO_LOG_LEVEL", None)
        level.value = before or KINETO_ERROR  # torch's, from its first start on


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress warnings of torch's C++ log about older blocks, unless a level is set."""
    level = _level("libc10.so", "FLAGS_caffe2_log_level")
    if level.value >= ERROR or "TORCH_CPP_LOG_LEVEL" in os.environ:
        yield
        return
    before, level.value = level.value, ERROR
    try:
        yield
    finally:
        level.value = before


@cache
def _level(library: str, name: str) -> ctypes.c_int:
    """Return a level of a log in torch's libraries; a number of our own if torch was built with another log."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / library)), name)
    except (OSError, ValueError):
        return ctypes.c_int(ERROR)


def _blocks(roots: Iterable[_ProfilerEvent]) -> list[Block]:
    """Return the blocks allocated and freed, in order of time."""
    blocks, todo = [], list(roots)
    while todo:
        event = todo.pop()
        todo += event.children
        block = event.extra_fields
        if event.name.startswith(FREED):
            blocks.append((event.start_time_ns, GIVEN, -int(event.name.removeprefix(FREED))))
        elif isinstance(block, _ExtraFields_Allocation) and block.device.type == "cpu":
            blocks.append((event.start_time_ns, block.ptr, block.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(blocks, key=lambda timed: timed[0])]


def _account(blocks: Iterable[Block]) -> Allocation:
    live: dict[int, int] = {}
    peak = now = 0
    for address, nbytes in blocks:
        if address == TAKEN_BACK:
            now += nbytes
            continue  # outputs that the caller has freed count again until the next window: they are no peak
        if address == GIVEN:
            now += nbytes
        elif nbytes > 0:
            live[address] = nbytes
            now += nbytes
        else:
            now -= live.pop(address, 0)
        peak = max(peak, now)
    return Allocation(peak, now)
