"""One at a time: what only one thread of the process can do, and modules that another thread is capturing.

    with ALONE:                     two profilers, or two traces, at once would end the process
    with capturing(module): ...     its parameters are fake tensors meanwhile
    undisturbed(module, read)       read(), once they are the real ones

A planned step takes no lock: it only compares two numbers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

T = TypeVar("T")

PLANNING_LOCK = threading.RLock()
# A forked child has none of the threads that may hold it.
os.register_at_fork(after_in_child=PLANNING_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


class _CaptureCount:
    """The captures of this process: how many have begun, and the modules of the one that is going on."""

    begun = 0
    modules: frozenset[int] = frozenset()
    thread = 0


@contextmanager
def capturing(module: nn.Module) -> Iterator[None]:
    """Nobody else plans, measures or calls this module meanwhile."""
    with PLANNING_LOCK:
        before = _CaptureCount.modules, _CaptureCount.thread
        _CaptureCount.thread = threading.get_ident()
        _CaptureCount.modules |= frozenset(map(id, module.modules()))
        _CaptureCount.begun += 1
        try:
            yield
        finally:
            _CaptureCount.modules, _CaptureCount.thread = before


def read_when_not_capturing(module: nn.Module, read: Callable[[], T]) -> T:
    """What `read` finds out about the module while no other thread is capturing it."""
    while True:
        begun = _CaptureCount.begun
        if _is_free(module):
            try:
                found = read()
            except Exception:  # of a dictionary that changed its size, say
                if begun == _CaptureCount.begun:
                    raise
            else:
                if begun == _CaptureCount.begun:
                    return found
        with PLANNING_LOCK:  # until that thread has planned
            pass


def _is_free(module: nn.Module) -> bool:
    busy = _CaptureCount.modules
    return not busy or _CaptureCount.thread == threading.get_ident() or busy.isdisjoint(map(id, module.modules()))
