"""Replace a file whole or not at all, and leave nothing beside it.

    replace(Path("run.pt"), fill, check)

Before:                      Meanwhile:                        After:
    run.pt   the old one         run.pt   the old one              run.pt   the new one
                                 a file without a name, which
                                 goes with the process

The new file gets a name only when it is complete, and for as long as a rename takes.  What a process leaves that is
killed in that moment, or wherever the file system knows no files without a name, is removed by the next `replace`: a
file that is being written is locked, and a lock ends with its process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SUFFIX = ".saving"
OPEN = "/proc/self/fd"  # where a process finds its own files by number
Check = Callable[[], None]


def replace(whole: Path, fill: Callable[[str], None], check: Check) -> None:
    """Let `fill` write to the path that it is given, and that file take the place of `whole`; `check` may raise what
    is against it.

    Raises:
        OSError: the folder does not take it.
    """
    _sweep(whole)
    file, name = _opened(whole)
    try:
        fill(name or f"{OPEN}/{file}")
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


def _opened(whole: Path) -> tuple[int, str | None]:
    """A new locked file beside `whole`, and its name if it has to have one."""
    try:
        file = os.open(whole.parent, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
        return _opened_by_name(whole)
    if not os.path.exists(f"{OPEN}/{file}"):  # without /proc it could never get a name
        os.close(file)
        return _opened_by_name(whole)
    _lock(file)
    return file, None


def _opened_by_name(whole: Path) -> tuple[int, str]:
    while True:
        file, name = tempfile.mkstemp(prefix=f".{whole.name}.", suffix=SUFFIX, dir=whole.parent)
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
