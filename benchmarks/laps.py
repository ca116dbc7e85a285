"""Measure a step on a device: the time of each lap, and its memory.

    took = Laps(device).of(step, 10)     Taken(ms=(12.1, 12.0, ...), peak=3.1e9, reserved=3.3e9)

On a GPU, times are from events, and bytes from the caching allocator: all that are allocated. On a CPU they are from
the clock and the profiler, and `reserved` is 0.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.clock import middle
from memgraph.profile.memory_meter import measure_peak, resident_bytes

Step = Callable[[], object]


class Overtime(BaseException):
    """A time limit was reached. It is not an Exception, because compilers catch those and go on."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the time of the body. It is interrupted between two lines of Python, every second until it stops.

    Raises:
        Overtime: the limit was reached.
    """

    def late(*_: object) -> None:
        raise Overtime(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Taken:
    """The milliseconds of each lap, and the peaks of allocated and reserved bytes."""

    ms: tuple[float, ...]
    peak: int
    reserved: int

    @property
    def spread(self) -> tuple[float, float, float]:
        """The ends of the middle half, with the median between them."""
        return middle(self.ms)


@dataclass(frozen=True)
class Laps:
    """Measures steps on one device."""

    device: torch.device

    def of(self, step: Step, laps: int, there: Iterable[Tensor] = ()) -> Taken:
        """Measure a step that has run before; `there` are the tensors on the device before it."""
        peak, reserved = self.bytes(step, there)
        return Taken(tuple(self.ms(step) for _ in range(laps)), peak, reserved)

    def ms(self, step: Step) -> float:
        """Return the milliseconds of one run."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            step()
            return (time.perf_counter() - begin) * 1e3
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize(self.device)
        events[0].record()
        step()
        events[1].record()
        torch.cuda.synchronize(self.device)
        return float(events[0].elapsed_time(events[1]))

    def bytes(self, step: Step, there: Iterable[Tensor]) -> tuple[int, int]:
        """Return the peaks of allocated and of reserved bytes in one run."""
        gc.collect()
        if self.device.type != "cuda":
            _, allocation = measure_peak(step)
            assert allocation is not None
            return resident_bytes(there) + allocation.peak, 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def clear(self) -> None:
        """Drop compiled code and cached memory, so that they do not count for the next step."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
