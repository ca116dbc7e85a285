"""CPU seconds of the phases of a program, each without those of the phases inside it.

phases = Phases(["capture", "trace"])
trace = phases.timed("trace", trace)
...
phases.seconds    ->   {"capture": 0.8, "trace": 1.2}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any


class Phases:
    """The seconds of each phase up to now."""

    def __init__(self, names: Iterable[str]) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self._inside: list[float] = []  # for each phase that runs, the seconds of phases inside it

    def timed(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and counts for the phase."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            self._inside.append(0.0)
            try:
                return work(*args, **kwargs)
            finally:
                spent = time.process_time() - begin
                self.seconds[phase] += spent - self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent

        return run
