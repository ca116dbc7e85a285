"""Let Ctrl-C wait until nothing is half done, and whatever else a signal raises.

    with Interrupts() as interrupts:
        ...                    # Ctrl-C is noted, and so is SIGTERM whose handler raises SystemExit
        interrupts.check()     # and raised here

A second one of a kind is raised at once, in case there is no end to the waiting.
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
        self.noted: dict[int, FrameType | None] = {}
        self.plain: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self.plain[number] = handler
            try:
                for number in self.plain:
                    signal.signal(number, self._note)
            except BaseException:  # of a signal that is not yet noted
                self._restore([*self.plain.items()])
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._restore([*self.plain.items()])
        finally:
            self.check()  # after an error, too: who only takes note of a signal would never hear of it

    def check(self) -> None:
        """Raise what was noted."""
        if self.noted:
            number = next(iter(self.noted))
            try:
                self.plain[number](number, self.noted.pop(number))
            finally:
                self.check()

    def _restore(self, rest: list[tuple[int, Any]]) -> None:
        """Give all signals their handlers back, though one of them is raised meanwhile."""
        try:
            while rest:
                signal.signal(*rest[-1])
                rest.pop()
        finally:
            if rest:
                self._restore(rest)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self.noted:
            del self.noted[number]
            self.plain[number](number, frame)
        self.noted[number] = frame
