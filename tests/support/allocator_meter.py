"""A second meter, which shares no code with memgraph's: what torch's allocator gives, counted where it asks libc for it.

    environment = preloaded(folder)    # for a child process, in which every block of a tensor is counted
    allocator = Allocator()            # in the child
    allocator.reset(); step(); allocator.most    # the most bytes of blocks there were at a time, in all threads

It counts the whole process to the byte.  `allocator.c` stands before libc and sees each block come and go.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def compiler() -> str | None:
    """The path of a C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc")


def preloaded(folder: Path) -> dict[str, str]:
    """The environment of a child that is counted; the library is built into the folder."""
    library, found = folder / "allocator.so", compiler()
    assert found is not None
    subprocess.run([found, "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], check=True)
    return os.environ | {"LD_PRELOAD": str(library)}


class Allocator:
    """What torch's allocator has given in this process since this was made."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.allocator_watch.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        for name in ("allocator_now", "allocator_most", "allocator_count"):
            getattr(self._library, name).restype = ctypes.c_long
        lines = Path("/proc/self/maps").read_text().splitlines()
        ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if "/libc10.so" in line]
        self._library.allocator_watch(min(first for first, _ in ends), max(last for _, last in ends))

    def reset(self) -> None:
        """Forget the most there were."""
        self._library.allocator_reset()

    @property
    def now(self) -> int:
        """Bytes of the blocks that there are."""
        return int(self._library.allocator_now())

    @property
    def most(self) -> int:
        """The most bytes of blocks at a time since the last reset."""
        return int(self._library.allocator_most())

    @property
    def count(self) -> int:
        """Blocks that were given."""
        return int(self._library.allocator_count())
