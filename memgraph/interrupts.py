"""Let Ctrl-C wait until nothing is half done, and whatever else a signal raises.

    with Interrupts() as interrupts:
        ...                    # Ctrl-C is noted, and so is SIGTERM whose handler raises SystemExit
        interrupts.check()     # and raised here

A second one is raised at once, in case there is no end to the waiting.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


class Interrupts:
    """Only the main thread is ever interrupted; anywhere else, and for signals that are not handled in Python, this
    does nothing."""

    def __init__(self) -> None:
        self.noted: tuple[int, FrameType | None] | None = None
        self.plain: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self.plain[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.plain.items():
            signal.signal(number, handler)
        if not any(error):
            self.check()

    def check(self) -> None:
        """Raise what was noted."""
        noted, self.noted = self.noted, None
        if noted is not None:
            self.plain[noted[0]](*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted is not None:
            self.check()
        self.noted = number, frame
