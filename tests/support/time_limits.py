"""No test outlives its time limit, and nothing that it has started outlives the run.

pytest-timeout fails a test at its limit. Where that does not end it, as in a hung call of C or while it tidies up, its process
prints where each thread is, and ends GRACE seconds later. pytest-xdist then names the test, and goes on in a new process. What such
a process leaves behind is adopted by the first process of the run, which ends it at the end.

With --within no test begins after so many seconds. This is a plugin of pytest; `ends_with` is for processes that tests start.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

BEGAN = time.monotonic()
GRACE = 60.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>
LIBC = ctypes.CDLL(None)
STDERR = pytest.StashKey[int]()  # while tests run, fd 2 is a file of pytest's


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, help="seconds after which no further test begins: the rest is skipped")
    parser.addoption("--grace", type=float, default=GRACE, help="seconds from a test's limit to the end of its process")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)
    if _is_first(config):
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seconds = item.config.getoption("within")
    if seconds is not None and time.monotonic() - BEGAN > seconds:
        pytest.skip(f"the {seconds:.0f} seconds of --within are over")
    _end_after(item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _end_after(item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _end_after(item.config)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if _is_first(config):
        for process in _descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    _end_after(config)  # a thread that never ends would keep this process


def ends_with(parent: int, seconds: float) -> None:
    """Have the kernel end this process with its parent, and after this time, whatever it does."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _is_first(config: pytest.Config) -> bool:
    return not hasattr(config, "workerinput")


def _end_after(config: pytest.Config) -> None:
    limit = config.getoption("timeout", None)
    seconds = float(config.getini("timeout") if limit is None else limit)
    if seconds > 0:  # 0 is no limit, for a debugger
        faulthandler.dump_traceback_later(seconds + config.getoption("grace"), exit=True, file=config.stash[STDERR])


def _descendants(process: int) -> list[int]:
    """Return the processes that this one has started, and those that these have."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]
