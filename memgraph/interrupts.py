"""Let Ctrl-C wait until nothing is half done.

    with Interrupts() as interrupts:
        ...                    # Ctrl-C is noted
        interrupts.check()     # and raised here

A second one is raised at once, in case there is no end to the waiting.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Only the main thread is ever interrupted; anywhere else, and where Ctrl-C is not handled in Python, this does
    nothing."""

    def __init__(self) -> None:
        self.noted: tuple[int, FrameType | None] | None = None
        self.plain: Any = None

    def __enter__(self) -> Interrupts:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self.plain = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self.plain is not None:
            signal.signal(signal.SIGINT, self.plain)
        if not any(error):
            self.check()

    def check(self) -> None:
        """Raise what was noted."""
        noted, self.noted = self.noted, None
        if noted is not None:
            self.plain(*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted is not None:
            self.check()
        self.noted = number, frame
