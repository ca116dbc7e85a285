"""Keep measurements on disk for later processes.

    write_cached("op aten.mm ...", [10.5, 4096])     in this process
    read_cached("op aten.mm ...")  ->  [10.5, 4096]  in every later one

The file is costs.sqlite in the folder MEMGRAPH_CACHE, by default memgraph/ in the user's cache. With an empty
MEMGRAPH_CACHE nothing is kept. A damaged or foreign file is renamed and replaced; a file that can't be used is ignored.
Each of these is one warning, and no error. A value that no measurement gives is as good as none.

A measurement that other work of the machine disturbed is kept with the share of it that was waited. Each later process
measures it once more, and keeps the less disturbed one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from .disturbance import Watch
from .user_warning import warn_user

T = TypeVar("T")

MARK, FORMAT = 0x6D656D67, 1  # in the header of each file that memgraph writes
FILE = "costs.sqlite"
MOST = 1 << 62  # of a time, a rate or a number of bytes
WAIT = 5.0  # seconds to wait for another process that writes
PAGES = ("page_count", "freelist_count", "page_size")
FORGET = (
    "DELETE FROM costs WHERE key IN (SELECT key FROM costs ORDER BY random() LIMIT (SELECT count(*) / 4 FROM costs))"
)
TABLE = "CREATE TABLE costs (key TEXT PRIMARY KEY, value TEXT NOT NULL, digest TEXT NOT NULL) WITHOUT ROWID"


def read_cached(key: str, file: str = FILE) -> Any:
    """Return the value kept under `key`; None if there is none or it can't be read."""
    costs = _costs(file)
    return None if costs is None else costs.get(key)


def write_cached(key: str, value: object, file: str = FILE) -> None:
    """Keep `value`, which must be valid JSON, for later processes."""
    costs = _costs(file)
    if costs is not None:
        costs.put(key, value)


def read_all_cached(keys: Iterable[str], file: str = FILE) -> dict[str, Any]:
    """Return the values kept under `keys`; None for a key that has no value."""
    costs = _costs(file)
    return dict.fromkeys(keys) if costs is None else costs.get_all(list(keys))


def write_all_cached(values: Mapping[str, object], file: str = FILE) -> None:
    """Keep values, which must be valid JSON, for later processes."""
    costs = _costs(file)
    if costs is not None and values:
        costs.put_all(values)


def evict_oldest(file: str, most_nbytes: int) -> None:
    """Drop a random quarter of the values if `file` is larger than `most_nbytes`.

    The oldest would be a bad choice: a loop over slightly more values than fit would then find nothing.
    """
    costs = _costs(file)
    if costs is not None:
        costs.thin_out(most_nbytes)


def measure_once(
    results: dict[str, T], key: str, measure: Callable[[], T], read: Callable[[Any], T], write: Callable[[T], object]
) -> T:
    """Return the measurement from `results` of this process, else from disk, else by calling `measure`."""
    if key not in results:
        kept = Kept.read(read_cached(key), read)
        if kept is None or kept.disturbed:
            with Watch() as watch:
                new = Kept(measure(), watch.disturbed)
            if kept is None or new.disturbed < kept.disturbed:
                kept = new
                write_cached(key, kept.written(write))
        results[key] = kept.value
    return results[key]


@dataclass(frozen=True)
class Kept(Generic[T]):
    """A measurement, and the share of it that was waited for a core, if that is much."""

    value: T
    disturbed: float = 0.0

    @staticmethod
    def read(cached: Any, read: Callable[[Any], T]) -> Kept[T] | None:
        """Return what the cache has; None if that is nothing, or nothing that a measurement gives."""
        is_disturbed = isinstance(cached, dict) and cached.keys() == {"measured", "disturbed"}
        value, disturbed = (cached["measured"], cached["disturbed"]) if is_disturbed else (cached, 0.0)
        if value is None or not is_measured([value, disturbed]):
            return None
        try:
            return Kept(read(value), float(disturbed))
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            return None

    def written(self, write: Callable[[T], object]) -> object:
        value = write(self.value)
        return {"measured": value, "disturbed": self.disturbed} if self.disturbed else value


def is_measured(value: object) -> bool:
    """Return True if all numbers of a value from the cache are finite, not negative and below any real one."""
    if isinstance(value, list | tuple | dict):
        return all(map(is_measured, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | bool | None) or (isinstance(value, int | float) and 0 <= value <= MOST)


def cache_folder() -> Path | None:
    """Return the folder of the cache; None if nothing is to be kept."""
    named = os.environ.get("MEMGRAPH_CACHE")
    if named is not None:
        return Path(named).expanduser().absolute() if named else None
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser().absolute() / "memgraph"


class CostDatabase:
    """One file of costs, opened for each access, so that no connection outlives a fork or blocks other processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readable = self.writable = True
        self.said = False

    def get(self, key: str) -> Any:
        return self.get_all([key])[key]

    def get_all(self, keys: Sequence[str]) -> dict[str, Any]:
        def read(file: sqlite3.Connection, key: str) -> Any:
            row = file.execute("SELECT value, digest FROM costs WHERE key = ?", (key,)).fetchone()
            # SQLite checks the structure of its pages, but not their content.
            if row and row[1] != _digest(key, row[0]):
                self._say("has damaged costs, which are measured again")
                return None
            return json.loads(row[0]) if row else None

        def read_all(file: sqlite3.Connection) -> dict[str, Any]:
            return {key: read(file, key) for key in keys}

        # The file is created by the first write.
        found = self._use(read_all) if keys and self.readable and self.path.exists() else None
        return dict.fromkeys(keys) if found is None else found

    def put(self, key: str, value: object) -> None:
        self.put_all({key: value})

    def put_all(self, values: Mapping[str, object]) -> None:
        texts = {key: json.dumps(value) for key, value in values.items()}
        rows = [(key, text, _digest(key, text)) for key, text in texts.items()]

        def write(file: sqlite3.Connection) -> None:
            with file:
                file.execute("BEGIN IMMEDIATE")
                file.executemany("INSERT OR REPLACE INTO costs VALUES (?, ?, ?)", rows)

        if self.writable:
            self._use(write)

    def thin_out(self, most_nbytes: int) -> None:
        def forget(file: sqlite3.Connection) -> None:
            pages, free, size = (file.execute(f"PRAGMA {name}").fetchone()[0] for name in PAGES)
            if (pages - free) * size > most_nbytes:
                file.execute(FORGET)

        if self.writable and self.path.exists():
            self._use(forget)

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Call `work` on the file, and once more on a new file if it is damaged; None if the file can't be used."""
        for may_replace in (True, False):
            try:
                with self._opened() as file:
                    return work(file)
            except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
                if not (may_replace and _is_damage(error) and self._replace(error)):
                    self._give_up(error)
                    return None
        return None

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # No write-ahead log: it needs shared memory, and the folder may be on a network.
        with closing(sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)) as file:
            file.execute("PRAGMA synchronous = OFF")  # values damaged by a power cut are measured again
            file.text_factory = partial(str, encoding="utf-8", errors="replace")  # the digest finds damaged text
            if _header(file) != (MARK, FORMAT):
                _create(file)
            yield file

    def _replace(self, why: Exception) -> bool:
        """Rename the file; return True if a new one can be created."""
        renamed = self.path.with_name(f"{self.path.name}.unreadable")
        try:
            with open(self.path.with_name(f"{self.path.name}.lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._is_sound():  # another process was faster
                    return True
                for log in ("", "-journal", "-wal", "-shm"):
                    if Path(f"{self.path}{log}").exists():
                        os.replace(f"{self.path}{log}", f"{renamed}{log}")
        except OSError:
            return False
        self._say(f"can't be read ({why}): it was renamed to {renamed}, and ops are measured again")
        return True

    def _is_sound(self) -> bool:
        try:
            with self._opened() as file:
                file.execute("SELECT key, value, digest FROM costs LIMIT 1")
                return bool(file.execute("PRAGMA quick_check").fetchone() == ("ok",))
        except (sqlite3.Error, UnicodeDecodeError):
            return False

    def _give_up(self, error: Exception) -> None:
        """Stop using the file in this process; a read-only file may still be read."""
        only_write = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY
        self.writable, self.readable = False, self.readable and only_write
        self._say(f"can't be used ({error}), so that every process measures ops again")

    def _say(self, what: str) -> None:
        if not self.said:
            self.said = True
            advice = "set MEMGRAPH_CACHE to another folder, or to an empty text to keep nothing"
            warn_user(f"the cache of costs {self.path} {what}; {advice}")


_open: dict[Path, CostDatabase] = {}


def _costs(file: str) -> CostDatabase | None:
    folder = cache_folder()
    return None if folder is None else _open.setdefault(folder / file, CostDatabase(folder / file))


def _header(file: sqlite3.Connection) -> tuple[int, int]:
    return file.execute("PRAGMA application_id").fetchone()[0], file.execute("PRAGMA user_version").fetchone()[0]


def _create(file: sqlite3.Connection) -> None:
    """Create the table in an empty file.

    Raises:
        sqlite3.DatabaseError: another program made the file, or another version of memgraph.
    """
    with file:
        file.execute("BEGIN IMMEDIATE")
        if _header(file) == (MARK, FORMAT):  # another process was faster
            return
        if file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] or _header(file) != (0, 0):
            raise sqlite3.DatabaseError("it was made by another program, or by another version of this one")
        file.execute(TABLE)
        file.execute(f"PRAGMA application_id = {MARK}")
        file.execute(f"PRAGMA user_version = {FORMAT}")


def _is_damage(error: Exception) -> bool:
    """Return True if the file is damaged; a table with other columns gives SQLITE_ERROR."""
    if not isinstance(error, sqlite3.OperationalError):
        return isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError)
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR  # Python's own errors have none


def _digest(key: str, value: str) -> str:
    return hashlib.blake2b(f"{len(key)} {key}{value}".encode(), digest_size=8).hexdigest()
