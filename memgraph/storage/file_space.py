"""Where a tier's files are, and how many bytes they may take.

FileSpace(folder)               files without a name in this folder, as many bytes as are free there
FileSpace(None, cap=8 << 30)    files in host memory, 8 GiB at most: no part of the device's budget

Files in host memory are the kernel's shared memory: they are no anonymous memory of the process, and tensors are mapped
from them as from a file on a disk.
"""

from __future__ import annotations

import logging
import os
from os import PathLike
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from ..system.device import CPU, unused_nbytes
from .spill_file import SpillError, advice_for, available_nbytes, is_ram, mount_description, spill_folder, unnamed_file

LOG = logging.getLogger(__name__)
UNCAPPED = 1 << 62


class HasIdleFiles(Protocol):
    """Has files that are not in use, as between two steps."""

    def close_idle(self) -> None: ...


class FileSpace:
    """Files without a name, in a folder or in host memory, which together take at most `cap` bytes.

    Files that there is no room for go `behind`, if that is given.
    """

    def __init__(self, folder: Path | None, cap: int = UNCAPPED, behind: FileSpace | None = None) -> None:
        self.folder, self.cap, self.behind = folder, cap, behind
        self.users: WeakSet[HasIdleFiles] = WeakSet()
        self._files: dict[int, tuple[int, int]] = {}  # file -> its inode, its bytes

    def __str__(self) -> str:
        return "host memory" if self.folder is None else str(self.folder)

    @property
    def is_memory(self) -> bool:
        """Return True if the files are meant to be in memory."""
        return self.folder is None

    def in_memory(self, file: int) -> bool:
        """Return True if a file that was opened here is in memory."""
        return self.is_memory and file in self._files

    @property
    def is_tracked(self) -> bool:
        """Return True if open files are counted."""
        return self.is_memory or self.cap < UNCAPPED

    @property
    def frees_nothing(self) -> bool:
        """Return True if the files are in a folder that is memory, so that what is offloaded there frees none."""
        return self.folder is not None and is_ram(self.folder)

    @property
    def description(self) -> str:
        """Return what tells one such place from others: a key for measurements."""
        return "host memory" if self.folder is None else mount_description(self.folder)

    @property
    def used_nbytes(self) -> int:
        """Return the bytes of the files that are open; a file that was closed counts no longer."""
        if self.is_tracked:
            self._files = {file: known for file, known in self._files.items() if _inode(file) == known[0]}
        return sum(nbytes for _, nbytes in self._files.values())

    @property
    def free_nbytes(self) -> int:
        """Return the bytes that a new file may have."""
        return max(0, min(self._available(), self.cap - self.used_nbytes))

    @property
    def capacity(self) -> int:
        """Return the bytes of all files, those that are open already among them."""
        return min(self._available() + self.used_nbytes, self.cap)

    def _available(self) -> int:
        return unused_nbytes(CPU) if self.folder is None else available_nbytes(self.folder)

    def open(self, nbytes: int, content: str = "activations") -> int:
        """Make a file of so many bytes, and return its descriptor.

        Raises:
            SpillError: there is no room for it.
        """
        if nbytes > self.cap - self.used_nbytes:
            for user in list(self.users):
                user.close_idle()
        if nbytes > self.cap - self.used_nbytes and self.behind is not None:
            LOG.info("%s has no room for %d bytes for %s, which go to %s", self, nbytes, content, self.behind)
            return self.behind.open(nbytes, content)
        if nbytes > self.cap - self.used_nbytes:
            option = "host" if self.folder is None else "disk"
            raise SpillError(
                f"{nbytes} bytes are wanted for {content} in {self}, where {self.used_nbytes} of {self.cap} are taken: "
                f"allow more with {option}=, or have fewer steps in flight"
            )
        file = unnamed_file(self.folder, nbytes, content) if self.folder is not None else _memory_file(nbytes, content)
        if self.is_tracked:
            self._files[file] = _inode(file), nbytes
        return file


Space = FileSpace | str | PathLike[str] | None


def file_space(space: Space) -> FileSpace:
    """Return the space that a folder is; None is the default folder.

    Raises:
        SpillError: it is no folder.
    """
    return space if isinstance(space, FileSpace) else FileSpace(spill_folder(space))


def _memory_file(nbytes: int, content: str) -> int:
    """Make a file in memory; its pages are allocated now, since a step can't do without them."""
    if nbytes > (free := unused_nbytes(CPU)):
        raise SpillError(f"{nbytes} bytes are wanted for {content} in host memory, {free} are free; lower host=")
    try:
        file = os.memfd_create("memgraph")
        try:
            os.posix_fallocate(file, 0, nbytes)
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        message = f"cannot make {nbytes} bytes of host memory for {content}: {error}"
        raise SpillError(f"{message}; {advice_for(error, 'lower host=')}") from error
    return file


def _inode(file: int) -> int:
    """Return what tells an open file from others; -1 if it is closed."""
    try:
        return os.fstat(file).st_ino
    except OSError:
        return -1
