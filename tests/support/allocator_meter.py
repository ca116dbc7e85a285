"""A meter that shares no code with memgraph's: it counts the calls of torch's allocator to libc.

    environment = preloaded(folder)    # for a child process; counts each block of a tensor
    allocator = Allocator()            # in the child
    allocator.reset(); step(); allocator.most    # peak bytes of blocks, in all threads

It counts the whole process to the byte. `allocator.c` is preloaded before libc, and sees each malloc and free.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def compiler() -> str | None:
    """Return the path of a C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc")


def preloaded(folder: Path) -> dict[str, str]:
    """Return the environment of a child that is counted; build the library in the folder."""
    library, found = folder / "allocator.so", compiler()
    assert found is not None
    subprocess.run([found, "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], check=True)
    return os.environ | {"LD_PRELOAD": str(library), "MEMGRAPH_POOL": "0"}  # the pool asks for pages, not for blocks


class Allocator:
    """The blocks that torch's allocator has returned in this process since this object was created."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.allocator_watch.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        for name in ("allocator_now", "allocator_most", "allocator_count"):
            getattr(self._library, name).restype = ctypes.c_long
        lines = Path("/proc/self/maps").read_text().splitlines()
        ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if "/libc10.so" in line]
        self._library.allocator_watch(min(first for first, _ in ends), max(last for _, last in ends))

    def reset(self) -> None:
        """Reset the peak."""
        self._library.allocator_reset()

    @property
    def now(self) -> int:
        """The bytes of all live blocks."""
        return int(self._library.allocator_now())

    @property
    def most(self) -> int:
        """The peak bytes of live blocks since the last reset."""
        return int(self._library.allocator_most())

    @property
    def count(self) -> int:
        """The number of blocks allocated."""
        return int(self._library.allocator_count())
