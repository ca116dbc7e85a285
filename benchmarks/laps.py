"""What a step takes on a device: its time, lap by lap, and its bytes.

    took = Laps(device).of(step, 10)     Taken(ms=(12.1, 12.0, ...), peak=3.1e9, reserved=3.3e9)

On a GPU events tell the times and the caching allocator the bytes, of everything that lies there.  On a CPU the clock
and the profiler do; `reserved` is 0 there.
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
    """Something takes too long.  It is no Exception, which a compiler would take for one of its own and go on."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let what runs here take no longer.  It is stopped between two lines of Python, every second until it stops.

    Raises:
        Overtime: it would have.
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
    """Milliseconds of each lap; the most bytes at once, allocated and reserved."""

    ms: tuple[float, ...]
    peak: int
    reserved: int

    @property
    def spread(self) -> tuple[float, float, float]:
        """The median between the ends of the middle half."""
        return middle(self.ms)


@dataclass(frozen=True)
class Laps:
    """Measures on one device."""

    device: torch.device

    def of(self, step: Step, laps: int, there: Iterable[Tensor] = ()) -> Taken:
        """Run a step that has run before; `there` is what lay on the device then."""
        peak, reserved = self.bytes(step, there)
        return Taken(tuple(self.ms(step) for _ in range(laps)), peak, reserved)

    def ms(self, step: Step) -> float:
        """The milliseconds of one run."""
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
        """The most that lies on the device in one run, and the most that is kept for it."""
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
        """Forget compiled code and what the allocator keeps, so that the next does not run in it."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
