"""Replace a file completely or not at all, and leave no other file beside it.

    replace(Path("run.pt"), fill, check)

Before:                      Meanwhile:                        After:
    run.pt   the old one         run.pt   the old one              run.pt   the new one
                                 a file without a name, which
                                 the process takes with it

The new file gets a temporary name only when it is complete, for the time of a rename.  If the process is killed in that
moment, the next `replace` removes that file.  The same happens on file systems without nameless files.  A file that is
being written is locked, and a lock ends with its process.

A symbolic link stays: the file that it leads to is replaced.  The new file has the owner and mode of the old one, or
those that the process gives to new files (umask).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import StateError
from ..storage.spill_file import sync_folder

SUFFIX = ".saving"
OPEN = "/proc/self/fd"  # a process's own open files, by number
PRIVATE, BY_UMASK = 0o600, 0o666  # modes
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
Check = Callable[[], None]


def replace(path: Path, fill: Callable[[str], None], check: Check) -> None:
    """Replace `path` by the file that `fill` writes to a path given to it; `check` may raise before the replacement.

    Raises:
        StateError: `path` exists and is no regular file.
        OSError: the folder can't be written.
    """
    path, old = Path(os.path.realpath(path)), regular_file(path)
    _remove_leftovers(path)
    file, name = _open_new(path, PRIVATE if old else BY_UMASK)
    try:
        mode = stat.S_IMODE((old or os.fstat(file)).st_mode)
        os.fchmod(file, PRIVATE)  # while it is written: `fill` opens it by name
        fill(name or f"{OPEN}/{file}")
        _set_owner_and_mode(file, old, mode)
        os.fsync(file)
        check()
        name = name or _give_name(file, path)
        os.replace(name, path)
        with suppress(OSError):  # not every folder can be opened; the file itself is on disk
            sync_folder(path.parent)
    except BaseException:
        if name is not None:
            with suppress(FileNotFoundError):
                os.unlink(name)
        raise
    finally:
        os.close(file)


def regular_file(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return the status of the file that `path` leads to; None if it does not exist.

    Raises:
        StateError: it is a folder, pipe, socket or device, which is neither replaced nor waited for.
        OSError: it can't be accessed.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise StateError(f"{path} is {kind}, and has to be a regular file; name another file")
    return status


def _set_owner_and_mode(file: int, old: os.stat_result | None, mode: int) -> None:
    if old is not None and (old.st_uid, old.st_gid) != (os.getuid(), os.getgid()):
        with suppress(OSError):  # not every process may give files away
            os.fchown(file, old.st_uid, old.st_gid)
    os.fchmod(file, mode)


def _remove_leftovers(path: Path) -> None:
    """Remove files of processes that were killed while they replaced this file."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"\w+" + re.escape(SUFFIX))
    for name in filter(pattern.fullmatch, os.listdir(path.parent)):
        with suppress(OSError):  # another process is writing it, or has removed it
            file = os.open(path.parent / name, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path.parent / name)
            finally:
                os.close(file)


def _open_new(path: Path, mode: int) -> tuple[int, str | None]:
    """Return a new locked file beside `path`, and its name if it needs one."""
    try:
        file = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, mode)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
        return _open_named(path, mode)
    if not os.path.exists(f"{OPEN}/{file}"):  # without /proc it could never get a name
        os.close(file)
        return _open_named(path, mode)
    _lock(file)
    return file, None


def _open_named(path: Path, mode: int = PRIVATE) -> tuple[int, str]:
    while True:
        name = str(path.parent / f".{path.name}.{secrets.token_hex(8)}{SUFFIX}")
        file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode)
        _lock(file)
        if os.fstat(file).st_nlink:  # another process may have removed it before it was locked
            return file, name
        os.close(file)


def _lock(file: int) -> None:
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _give_name(file: int, path: Path) -> str:
    """Give a complete file a name."""
    name = f".{path.name}.{secrets.token_hex(8)}{SUFFIX}"
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # With `dst_dir_fd`, Python asks the kernel to follow the link to the open file.
        os.link(f"{OPEN}/{file}", name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return str(path.parent / name)
