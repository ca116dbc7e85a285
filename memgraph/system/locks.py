"""Let one thread at a time plan, measure and capture.

    with PLANNING_LOCK: ...                    two profilers or two traces at once would end the process
    with capturing(module): ...                its parameters are fake tensors meanwhile
    read_when_not_capturing(module, read)      read(), while they are real tensors

A planned step takes no lock: it only compares two numbers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from .signals import Interrupts

T = TypeVar("T")

PLANNING_LOCK = threading.RLock()
# In a forked child the threads that hold the lock do not exist.
os.register_at_fork(after_in_child=PLANNING_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


class _CaptureCount:
    """The number of captures that this process started, and the modules and thread of the current one."""

    started = 0
    modules: frozenset[int] = frozenset()
    thread = 0


@contextmanager
def capturing(module: nn.Module) -> Iterator[None]:
    """Keep other threads from planning, measuring or calling the module, and delay Ctrl-C.

    Python that torch's C++ calls while it traces must not raise at any moment: that ends the process.
    """
    with PLANNING_LOCK, Interrupts():
        before = _CaptureCount.modules, _CaptureCount.thread
        _CaptureCount.thread = threading.get_ident()
        _CaptureCount.modules |= frozenset(map(id, module.modules()))
        _CaptureCount.started += 1
        try:
            yield
        finally:
            _CaptureCount.modules, _CaptureCount.thread = before


def read_when_not_capturing(module: nn.Module, read: Callable[[], T]) -> T:
    """Call `read` while no other thread captures the module; repeat it if a capture started meanwhile."""
    while True:
        started = _CaptureCount.started
        if _is_free(module):
            try:
                result = read()
            except Exception:  # such as a dictionary that changed its size
                if started == _CaptureCount.started:
                    raise
            else:
                if started == _CaptureCount.started:
                    return result
        with PLANNING_LOCK:  # wait for the other thread
            pass


def _is_free(module: nn.Module) -> bool:
    busy = _CaptureCount.modules
    return not busy or _CaptureCount.thread == threading.get_ident() or busy.isdisjoint(map(id, module.modules()))
