"""Make files on disk that no one else can see and that vanish with the process.

Before:                            After:
    /var/tmp  79 GB free               /var/tmp  77 GB free, and lists nothing new
                                       file 7: 2 GB, mode 0600, no name, every block allocated

The kernel frees a file without a name when it is closed, after a crash too. Its blocks are allocated before the first
byte is written, so that a full disk is an error here and not in the middle of a step. It bypasses the page cache, which
would fill the RAM that the budget promised to leave free.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from os import PathLike
from pathlib import Path

from ..errors import MemgraphError

Folder = str | PathLike[str] | None

PAGE = 4096  # not 512: drives with 4096-byte sectors refuse less


class SpillError(MemgraphError):
    """The disk does not provide, take or keep the bytes."""


def spill_folder(folder: Folder = None) -> Path:
    """Return `folder`; without one, the first of the temporary folder and /var/tmp that is not RAM."""
    chosen = Path(tempfile.gettempdir() if folder is None else folder)
    try:
        why_not = "" if chosen.is_dir() else "it is not a folder"
    except OSError as error:  # of a name that is too long
        why_not = os.strerror(error.errno or 0)
    if why_not:
        raise SpillError(f"activations cannot go to {chosen}: {why_not}; name one with spill_dir=")
    lasting = Path("/var/tmp")
    if folder is None and is_ram(chosen) and os.access(lasting, os.W_OK) and not is_ram(lasting):
        return lasting
    return chosen.absolute()


def require_writable(folder: Folder) -> None:
    """Make a file of one page in a folder that the user has named.

    Raises:
        SpillError: it is no folder, or takes no files.
    """
    os.close(unnamed_file(spill_folder(folder), PAGE))


def is_ram(folder: Path) -> bool:
    """Return True if files in `folder` stay in memory, and False where the kernel does not tell."""
    return any(words[words.index("-") + 1] in ("tmpfs", "ramfs", "devtmpfs") for words in _mounts(folder))


def _mounts(folder: Path) -> list[list[str]]:
    """The kernel's line for every mount point of the file system of `folder`, in words."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []
    # 25 24 0:23 / /dev/shm rw,relatime shared:2 - tmpfs tmpfs rw,size=24684096k
    return [words for words in map(str.split, lines) if words[2] == number]


def mount_description(folder: Path) -> str:
    """Return the device of a folder and its mount, as far as the kernel tells: a key for measurements."""
    mounts = [words for words in _mounts(folder) if folder.is_relative_to(words[4])]
    if not mounts:
        return f"{os.stat(folder).st_dev} {folder}"
    nearest = max(mounts, key=lambda words: len(words[4]))
    return " ".join((*nearest[2:5], *nearest[nearest.index("-") + 1 :][:2]))


def unnamed_file(folder: Path, nbytes: int, content: str = "activations") -> int:
    """Open a file of `nbytes` in `folder` that has no name, and return its descriptor."""
    try:
        _check_space(folder, nbytes, content)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as unnamed:
            file = os.dup(unnamed.fileno())
        try:
            os.posix_fallocate(file, 0, nbytes)
            if bypass_page_cache(file):
                _try_write(file)
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        message = f"cannot make a file of {nbytes} bytes for {content} in {folder}: {error}"
        advice = advice_for(error, "name a writable folder on a disk with spill_dir=")
        raise SpillError(f"{message}; {advice}") from error
    return file


def advice_for(error: BaseException | None, otherwise: str) -> str:
    """Return what to do about a system error: raise the limit that was hit, or else `otherwise`."""
    number = getattr(error, "errno", None)
    if number == errno.EFBIG:
        return "the process may not write files of this size: raise the limit (ulimit -f, RLIMIT_FSIZE)"
    if number in (errno.EMFILE, errno.ENFILE):
        return "too many files are open: raise the limit (ulimit -n, RLIMIT_NOFILE), or close some"
    return otherwise


def _check_space(folder: Path, nbytes: int, content: str) -> None:
    """Refuse what does not fit before trying, because trying fills the disk for everyone else."""
    if nbytes > (available := available_nbytes(folder)):
        message = f"{nbytes} bytes are wanted for {content} in {folder}, {available} are available"
        raise SpillError(f"{message}; free some, name a folder on a larger disk with spill_dir=, or raise the budget")


def available_nbytes(folder: Path) -> int:
    """Return the bytes that a file in `folder` may have; 2**62 for a network file system that reports no blocks."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else 1 << 62


def bypass_page_cache(file: int) -> bool:
    """Set O_DIRECT, or leave the file buffered where the file system does not support it; return True if it is set."""
    # Set only now, because where fallocate is emulated it writes single bytes, which O_DIRECT refuses.
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _try_write(file: int) -> None:
    """Leave the file buffered if it refuses its first write: some file systems take the flag and do that."""
    try:
        os.pwrite(file, mmap.mmap(-1, PAGE), 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk, so that a rename outlives a crash of the system."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def whole_pages(nbytes: int) -> int:
    """Round `nbytes` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
