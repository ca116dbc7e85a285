"""Random bytes, a copy to disk and back, and a gate that blocks it: `round_trip(lease, 0, noise(MANY))`."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from memgraph.storage.file_tier import FileLease
from memgraph.storage.io_threads import WORKERS, submit

MANY = 3 * (1 << 20) + 17
SHM = Path("/dev/shm")


def noise(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8) if nbytes else torch.empty(0).byte()


def round_trip(lease: FileLease, slot: int, tensor: torch.Tensor) -> torch.Tensor:
    back = torch.empty_like(tensor)
    lease.offload(slot, tensor)
    lease.free(slot)
    lease.reload(slot, back)
    lease.wait(slot)
    return back


class Gate:
    """A replacement for `os.pwritev` that sets `reached`, and writes once it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened, self.written = threading.Event(), threading.Event(), 0
        self.pwritev = os.pwritev
        monkeypatch.setattr(os, "pwritev", self)

    def __call__(self, file: int, views: list[memoryview], offset: int) -> int:
        self.reached.set()
        assert self.opened.wait(60)
        moved = self.pwritev(file, views, offset)
        self.written += moved
        return moved


def drain() -> None:
    """Wait until the workers have dropped the references of earlier tasks."""
    together = threading.Barrier(WORKERS + 1)
    for _ in range(WORKERS):
        submit(together.wait)
    together.wait()


def files_in(folder: Path) -> list[Path]:
    return [file for file in Path("/proc/self/fd").iterdir() if os.path.realpath(file).startswith(str(folder))]
