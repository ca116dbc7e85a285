"""The share of a measurement that is other work of the machine: time in which threads were ready, and had no core.

with Watch() as watch: measure()   ->   watch.share: 0.0 on a quiet machine, 0.5 if another process wants the same core

Linux counts it for each thread, in /proc/self/task/*/schedstat; where it does not, the clock is compared with the
processors' time. A clock that stands still or runs back leaves nothing that could be believed: the share is 1.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

TASKS = Path("/proc/self/task")
OWN = Path("/proc/thread-self/schedstat")
LIMIT = 0.1  # from this share on a measurement is disturbed, and a plan rests on disturbed prices
LOG = logging.getLogger(__name__)
_warned: list[float] = []  # in this process


class Watch:
    """Watches what runs inside of its `with`; `share` is that of its time that was waited for a core."""

    share = 0.0

    def __enter__(self) -> Self:
        self._delays, self._began, self._cpu = _delays(), time.perf_counter(), time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        seconds = time.perf_counter() - self._began
        delays = _delays()
        waited = sum(delay - self._delays.get(task, 0.0) for task, delay in delays.items())
        if not delays:
            waited = seconds - (time.process_time() - self._cpu)
        self.share = min(1.0, max(0.0, waited / seconds)) if seconds > 0 else 1.0

    @property
    def disturbed(self) -> float:
        """The share, if it is enough to make a measurement doubtful; otherwise 0."""
        return round(self.share, 2) if self.share >= LIMIT else 0.0


def waited_us() -> float:
    """Return the microseconds that this thread has waited for a core so far; 0 if the system counts none."""
    with suppress(OSError, ValueError, IndexError):
        return int(OWN.read_bytes().split()[1]) / 1e3
    return 0.0


def note_disturbed(shares: Iterable[float]) -> float:
    """Return the largest share of a step's time whose prices were disturbed, 0 if it is small; warn once a process."""
    share = max(shares, default=0.0)
    if share < LIMIT:
        return 0.0
    if not _warned:
        LOG.warning("prices: %s", disturbed_text(share))
        _warned.append(share)
    return round(share, 2)


def disturbed_text(share: float) -> str:
    """Return what a plan says that rests on prices which were disturbed for so much of the step's time."""
    return (
        f"{share:.0%} of the ops' time was measured while other work had cores of this machine; a new process measures "
        "these ops once more, and may find a faster plan (no byte depends on it)"
    )


def _delays() -> dict[str, float]:
    """Return the seconds that each thread of this process has waited for a core, if the system counts them."""
    found = dict[str, float]()
    with suppress(OSError):
        for task in os.listdir(TASKS):
            with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                found[task] = int((TASKS / task / "schedstat").read_bytes().split()[1]) / 1e9
    return found
