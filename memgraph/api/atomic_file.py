"""Replace a file whole or not at all, and leave nothing beside it.

    replace(Path("run.pt"), fill, check)

Before:                      Meanwhile:                        After:
    run.pt   the old one         run.pt   the old one              run.pt   the new one
                                 a file without a name, which
                                 goes with the process

The new file gets a name only when it is complete, and for as long as a rename takes.  What a process leaves that is
killed in that moment, or wherever the file system knows no files without a name, is removed by the next `replace`: a
file that is being written is locked, and a lock ends with its process.

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

SUFFIX = ".saving"
OPEN = "/proc/self/fd"  # where a process finds its own files by number
PRIVATE, BY_UMASK = 0o600, 0o666  # modes
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
Check = Callable[[], None]


def replace(whole: Path, fill: Callable[[str], None], check: Check) -> None:
    """Let `fill` write to the path that it is given, and that file take the place of `whole`; `check` may raise what
    is against it.

    Raises:
        StateError: `whole` is there and is no regular file.
        OSError: the folder does not take it.
    """
    whole, old = Path(os.path.realpath(whole)), regular_file(whole)
    _sweep(whole)
    file, name = _opened(whole, PRIVATE if old else BY_UMASK)
    try:
        mode = stat.S_IMODE((old or os.fstat(file)).st_mode)
        os.fchmod(file, PRIVATE)  # while it is written: it is opened once more by its name
        fill(name or f"{OPEN}/{file}")
        _set_owner_and_mode(file, old, mode)
        os.fsync(file)
        check()
        name = name or _named(file, whole)
        os.replace(name, whole)
        _sync(whole.parent)
    except BaseException:
        if name is not None:
            with suppress(FileNotFoundError):
                os.unlink(name)
        raise
    finally:
        os.close(file)


def regular_file(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return the status of the file that `path` leads to; None if there is nothing.

    Raises:
        StateError: it is a folder, pipe, socket or device, which is neither replaced nor waited for.
        OSError: it can't be looked at.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise StateError(f"{path} is {kind}, and has to be a regular file; name another file")
    return found


def _set_owner_and_mode(file: int, old: os.stat_result | None, mode: int) -> None:
    if old is not None and (old.st_uid, old.st_gid) != (os.getuid(), os.getgid()):
        with suppress(OSError):  # not every process may give files away
            os.fchown(file, old.st_uid, old.st_gid)
    os.fchmod(file, mode)


def _sweep(whole: Path) -> None:
    """Remove what processes have left that were killed while they saved under this name."""
    pattern = re.compile(re.escape(f".{whole.name}.") + r"\w+" + re.escape(SUFFIX))
    for name in filter(pattern.fullmatch, os.listdir(whole.parent)):
        with suppress(OSError):  # somebody else writes it, or was faster
            file = os.open(whole.parent / name, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(whole.parent / name)
            finally:
                os.close(file)


def _opened(whole: Path, mode: int) -> tuple[int, str | None]:
    """A new locked file beside `whole`, and its name if it has to have one."""
    try:
        file = os.open(whole.parent, os.O_TMPFILE | os.O_RDWR, mode)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
        return _opened_by_name(whole, mode)
    if not os.path.exists(f"{OPEN}/{file}"):  # without /proc it could never get a name
        os.close(file)
        return _opened_by_name(whole, mode)
    _lock(file)
    return file, None


def _opened_by_name(whole: Path, mode: int = PRIVATE) -> tuple[int, str]:
    while True:
        name = str(whole.parent / f".{whole.name}.{secrets.token_hex(8)}{SUFFIX}")
        file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode)
        _lock(file)
        if os.fstat(file).st_nlink:  # another process may have swept it before it was locked
            return file, name
        os.close(file)


def _lock(file: int) -> None:
    with suppress(OSError):  # a file system without locks, where nothing is swept either
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _named(file: int, whole: Path) -> str:
    """Give a complete file a name."""
    name = f".{whole.name}.{secrets.token_hex(8)}{SUFFIX}"
    folder = os.open(whole.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # With a folder given, Python asks the kernel to follow the link, which is the open file.
        os.link(f"{OPEN}/{file}", name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return str(whole.parent / name)


def _sync(folder: Path) -> None:
    """Bring the new name to disk, where a folder can be opened."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
