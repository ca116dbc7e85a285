"""Progress lines while a call is planned: the first after two seconds, then one every few seconds.

    memgraph: pricing ops, 120 of 340, at most about 9 s left (4 s so far)
    memgraph: planning, passes tried, 1 of 9, best +2.8%, within 0.4% of the bound, 9 s of time_limit left (31 s so far)
    memgraph: time_limit= ends planning after so many seconds, and plan= takes a saved plan instead    after 20 seconds

They are printed if stderr is a terminal or below a cell of a notebook, and logged by the `memgraph` logger (INFO)
otherwise.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from passes import PlanResult

from ..graph.provenance import counting_nodes

FIRST_S = 2.0  # seconds of silence; quick plans say nothing
NEXT_S = 5.0  # between two lines
ADVICE_S = 20.0  # of planning, after which some advice is of use
ADVICE = "time_limit= ends planning after so many seconds, and plan= takes a saved plan instead"
LOG = logging.getLogger("memgraph")


class Progress:
    """Reports from a thread of its own how far planning is, while it is entered.

    Each phase has a name and, if known, a number of items; `done` counts them. How many ops a trace will have is not
    known before it ends, so capture says how many there are.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._phase, self._count, self._of, self._since = "beginning", 0, 0, self._begin
        self._best = ""
        self._until = math.inf
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        with suppress(RuntimeError):  # no thread can be started: then there are no lines
            thread = threading.Thread(target=self._tell, name="memgraph-progress", daemon=True)
            thread.start()
            self._thread = thread
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # a logging handler may wait for a lock of this thread

    def phase(self, name: str, of: int = 0) -> None:
        """Begin a phase of `of` items; 0 if their number is not known."""
        self._phase, self._count, self._of, self._since, self._best = name, 0, of, time.monotonic(), ""

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Count the ops that are traced in this block."""
        self.phase("capturing forward and backward, ops traced")
        with counting_nodes(self.done):
            yield

    def bound(self, until: float) -> None:
        """Set when planning ends, in seconds of `time.monotonic`."""
        self._until = until

    def done(self, _: object = None) -> None:
        """Count one more item of the phase."""
        self._count += 1

    def tried(self, best: PlanResult, budget: int) -> None:
        """Count one more pass of a search, and say what the best plan behind it is."""
        fits = best.forecast.peak <= budget
        self._best = f", best {best.overhead:+.1%}, within {best.gap:.1%} of the bound" if fits else ", none fits yet"
        self.done()

    def line(self) -> str:
        now = time.monotonic()
        some = f", {self._count} of {self._of}" if self._of else f", {self._count}" if self._count else ""
        return f"{self._phase}{some}{self._best}{self._left(now)} ({now - self._begin:.0f} s so far)"

    def _left(self, now: float) -> str:
        if self._until < math.inf:
            left = self._until - now
            return f", {left:.0f} s of time_limit left" if left > 0 else ", past time_limit: ending with what is needed"
        if not (self._of and self._count):
            return ""
        rest = (now - self._since) / self._count * max(0, self._of - self._count)
        return f", at most about {rest:.0f} s left"

    def _tell(self) -> None:
        wait, advised = FIRST_S, False
        while not self._ended.wait(wait):
            with suppress(Exception):  # a failing logging handler, or a closed terminal
                log_progress(self.line())
                if not advised and time.monotonic() - self._begin >= ADVICE_S:
                    advised = True
                    log_progress(ADVICE)
            wait = NEXT_S


def log_progress(line: str) -> None:
    """Print the line on a terminal or in a notebook, log it elsewhere."""
    if sys.stderr is not None and type(sys.stderr).__module__.startswith("ipykernel."):
        print(f"memgraph: {line}", file=sys.stderr, flush=True)
    elif sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True, highlight=False, soft_wrap=True).print(f"memgraph: {line}", style="dim", markup=False)
    else:
        LOG.info(line)
