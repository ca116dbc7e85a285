"""What was measured on this machine, kept on disk for the processes that come after this one.

    keep("op aten.mm ...", [10.5, 4096])      in this process
    kept("op aten.mm ...")  ->  [10.5, 4096]  in every later one

It lies in costs.sqlite in the folder that MEMGRAPH_CACHE names, by default memgraph/ in the user's cache; with an empty
MEMGRAPH_CACHE nothing is kept.  A file that is damaged or somebody else's is put aside and begun anew; one that can't
be used is ignored.  Either is said once, and neither is an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .user_warning import warn_user

T = TypeVar("T")

MARK, FORMAT = 0x6D656D67, 1  # in the header of every file that is ours
FILE = "costs.sqlite"
WAIT = 5.0  # seconds for which another process may be writing
PAGES = ("page_count", "freelist_count", "page_size")
FORGET = (
    "DELETE FROM costs WHERE key IN (SELECT key FROM costs ORDER BY random() LIMIT (SELECT count(*) / 4 FROM costs))"
)
TABLE = "CREATE TABLE costs (key TEXT PRIMARY KEY, value TEXT NOT NULL, digest TEXT NOT NULL) WITHOUT ROWID"


def read_cached(key: str, file: str = FILE) -> Any:
    """What was kept under `key`; None if nothing was, or if it can't be had."""
    costs = _costs(file)
    return None if costs is None else costs.get(key)


def write_cached(key: str, value: object, file: str = FILE) -> None:
    """Keep `value`, which JSON can write, for later processes."""
    costs = _costs(file)
    if costs is not None:
        costs.put(key, value)


def evict_oldest(file: str, most_nbytes: int) -> None:
    """Where more than so many bytes are kept in `file`, forget a quarter of it, by chance: a loop through a little more
    than there is room for would find none of what was kept longest ago."""
    costs = _costs(file)
    if costs is not None:
        costs.thin_out(most_nbytes)


def measure_once(
    known: dict[str, T], key: str, measure: Callable[[], T], read: Callable[[Any], T], written: Callable[[T], object]
) -> T:
    """What was measured in this process, where it is `known`, or in an earlier one; measured now otherwise."""
    if key not in known:
        found = read_cached(key)
        known[key] = measure() if found is None else read(found)
        if found is None:
            write_cached(key, written(known[key]))
    return known[key]


def cache_folder() -> Path | None:
    """The folder in which costs are kept; None if they are not."""
    named = os.environ.get("MEMGRAPH_CACHE")
    if named is not None:
        return Path(named).expanduser().absolute() if named else None
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "memgraph"


class CostDatabase:
    """One file of costs.  It is opened for each look: so no connection outlives a fork, or holds up other processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readable = self.writable = True
        self.said = False

    def get(self, key: str) -> Any:
        def read(file: sqlite3.Connection) -> Any:
            row = file.execute("SELECT value, digest FROM costs WHERE key = ?", (key,)).fetchone()
            # SQLite checks the shape of its pages, and not what stands in them.
            if row and row[1] != _digest(key, row[0]):
                self._say("has costs in it that were damaged since they were measured: those are measured anew")
                return None
            return json.loads(row[0]) if row else None

        # A cache that is not there yet is made when there is something to keep.
        return self._tried(read) if self.readable and self.path.exists() else None

    def put(self, key: str, value: object) -> None:
        text = json.dumps(value)

        def write(file: sqlite3.Connection) -> None:
            file.execute("INSERT OR REPLACE INTO costs VALUES (?, ?, ?)", (key, text, _digest(key, text)))

        if self.writable:
            self._tried(write)

    def thin_out(self, most_nbytes: int) -> None:
        def forget(file: sqlite3.Connection) -> None:
            pages, free, size = (file.execute(f"PRAGMA {name}").fetchone()[0] for name in PAGES)
            if (pages - free) * size > most_nbytes:
                file.execute(FORGET)

        if self.writable and self.path.exists():
            self._tried(forget)

    def _tried(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What `work` finds in the file, which is begun anew if need be; None if it is of no use."""
        for again in (True, False):
            try:
                with self._opened() as file:
                    return work(file)
            except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
                if not (again and _is_damage(error) and self._put_aside(error)):
                    self._give_up(error)
                    return None
        return None

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # No write-ahead log, which needs memory shared between all users: a home may lie on a network.
        with closing(sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)) as file:
            file.execute("PRAGMA synchronous = OFF")  # what a power cut damages is measured anew
            file.text_factory = partial(str, encoding="utf-8", errors="replace")  # the digest shows what is damaged
            if _marks(file) != (MARK, FORMAT):
                _begin(file)
            yield file

    def _put_aside(self, why: Exception) -> bool:
        """Make room for a new file; whether there is some now."""
        aside = self.path.with_name(f"{self.path.name}.unreadable")
        try:
            with open(self.path.with_name(f"{self.path.name}.lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._is_sound():  # another process was faster
                    return True
                for log in ("", "-journal", "-wal", "-shm"):
                    if Path(f"{self.path}{log}").exists():
                        os.replace(f"{self.path}{log}", f"{aside}{log}")
        except OSError:
            return False
        self._say(f"is no file of costs that can be read ({why}): it is {aside} now, and ops are measured anew")
        return True

    def _is_sound(self) -> bool:
        try:
            with self._opened() as file:
                file.execute("SELECT key, value, digest FROM costs LIMIT 1")
                return bool(file.execute("PRAGMA quick_check").fetchone() == ("ok",))
        except (sqlite3.Error, UnicodeDecodeError):
            return False

    def _give_up(self, error: Exception) -> None:
        """Do without the file in this process; one that can't be written may still be read."""
        only_write = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY
        self.writable, self.readable = False, self.readable and only_write
        self._say(f"can't be used ({error}), so that ops are measured anew in every process")

    def _say(self, what: str) -> None:
        if not self.said:
            self.said = True
            advice = "name a folder of your own with MEMGRAPH_CACHE, or make that empty to keep nothing"
            warn_user(f"the cache of costs {self.path} {what}; {advice}")


_open: dict[Path, CostDatabase] = {}


def _costs(file: str) -> CostDatabase | None:
    folder = cache_folder()
    return None if folder is None else _open.setdefault(folder / file, CostDatabase(folder / file))


def _marks(file: sqlite3.Connection) -> tuple[int, int]:
    return file.execute("PRAGMA application_id").fetchone()[0], file.execute("PRAGMA user_version").fetchone()[0]


def _begin(file: sqlite3.Connection) -> None:
    """Make the table in an empty file.

    Raises:
        sqlite3.DatabaseError: the file is not empty, and not ours.
    """
    with file:
        file.execute("BEGIN IMMEDIATE")
        if _marks(file) == (MARK, FORMAT):  # another process was faster
            return
        if file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] or _marks(file) != (0, 0):
            raise sqlite3.DatabaseError("it was made by another program, or by another version of this one")
        file.execute(TABLE)
        file.execute(f"PRAGMA application_id = {MARK}")
        file.execute(f"PRAGMA user_version = {FORMAT}")


def _is_damage(error: Exception) -> bool:
    """Whether the file itself is at fault; SQLITE_ERROR is what a table of other columns gives."""
    if not isinstance(error, sqlite3.OperationalError):
        return isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError)
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR  # Python's own errors have none


def _digest(key: str, value: str) -> str:
    return hashlib.blake2b(f"{len(key)} {key}{value}".encode(), digest_size=8).hexdigest()
