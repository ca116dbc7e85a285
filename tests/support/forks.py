"""A child of fork that works, and ends whatever happens: none goes on with the tests of its parent.

    child = forked(lambda: step(model))    # a process that does this meanwhile
    child.code()                           # 0 if it did, 1 if that raised, 2 if it returned False, minus the signal that killed it

It ends with its work, with its time, and with its parent, and what it has started ends with it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch

from tests.support.time_limits import ends_with

SECONDS = 60
RIGHT, RAISED, WRONG = 0, 1, 2


@dataclass(frozen=True)
class Child:
    """A child, and the time at which it has to have ended."""

    process: int
    until: float

    def code(self) -> int:
        """Wait for it, end what it has left, and return its exit code.

        Raises:
            AssertionError: its time was over.
        """
        asked = os.WEXITED | os.WNOWAIT  # its group exists until it is waited for
        try:
            while (ended := os.waitid(os.P_PID, self.process, asked | os.WNOHANG)) is None:
                if time.monotonic() > self.until:
                    break
                time.sleep(0.005)
        finally:
            os.killpg(self.process, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        assert ended is not None and code != -signal.SIGALRM, "a child of fork has not ended in its time"
        return code


def forked(work: Callable[[], object], seconds: float = SECONDS) -> Child:
    """Start a child that does this."""
    parent, threads = os.getpid(), torch.get_num_threads()
    torch.set_num_threads(1)  # a child lacks OpenMP's other threads, and torch would wait for them
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # that a thread may hold a lock
        child = os.fork()
    if not child:
        _work(work, parent, seconds)
    torch.set_num_threads(threads)
    _lead_group(child)
    return Child(child, time.monotonic() + seconds)


def _work(work: Callable[[], object], parent: int, seconds: float) -> NoReturn:
    code = RAISED
    try:
        _lead_group(0)
        ends_with(parent, seconds)
        code = WRONG if work() is False else RIGHT
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        os._exit(code)


def _lead_group(process: int) -> None:
    with suppress(PermissionError):  # it did so itself, and is another program by now
        os.setpgid(process, process)
