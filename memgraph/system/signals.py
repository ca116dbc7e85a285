"""Delay Ctrl-C, and other signals that raise, until the state is consistent.

    with Interrupts() as interrupts:
        ...                    # Ctrl-C is recorded, and so is a SIGTERM whose handler raises SystemExit
        interrupts.check()     # and raised here

A second signal of the same kind is raised at once, in case the work does not end.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


class Interrupts:
    """Records signals and raises them later.

    Does nothing outside the main thread, and for signals without a Python handler.
    """

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
            except BaseException:  # raised by a signal that is not recorded yet
                self._restore([*self.plain.items()])
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._restore([*self.plain.items()])
        finally:
            self.check()  # after an error, too: a handler that does not raise must still run

    def check(self) -> None:
        """Run the handlers of the recorded signals."""
        if self.noted:
            number = next(iter(self.noted))
            try:
                self.plain[number](number, self.noted.pop(number))
            finally:
                self.check()

    def _restore(self, rest: list[tuple[int, Any]]) -> None:
        """Restore all handlers, even if a handler raises meanwhile."""
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
