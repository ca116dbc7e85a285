"""A checkpoint folder of several ranks, which is replaced whole or not at all.

    .run.new/    written beside the old one, and synced to disk    ->    run/

A rank's error is a `StateError` on all of them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...errors import CollectiveError, MemgraphError, StateError
from ...storage.spill_file import advice_for, sync_folder
from ..comm.rank_group import all_failures
from ..comm.watchdog import CollectiveWatchdog
from .safe_reader import METADATA, Planner, Reader, note_checksums, refuse_damaged

T = TypeVar("T")
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants of Linux


@dataclass(frozen=True, eq=False)
class CheckpointFolder:
    """A folder that these ranks save to, or load from; without a watchdog this process alone does.

    Attributes:
        name: of what is done, for errors.
    """

    path: Path
    name: str
    watchdog: CollectiveWatchdog | None

    def save(self, state: dict[str, Any]) -> None:
        """Write the entries of all ranks; each may have entries of its own.

        Raises:
            StateError: it can't be written; the old folder is as it was.
        """
        new, first = _beside(self.path, "new"), self._rank == 0
        self.on_all_ranks(lambda: _clear(new, self.path) if first else None)
        try:
            self.on_all_ranks(lambda: _write(self._group, state, new))
            self.on_all_ranks(lambda: note_checksums(new, self._rank))
            self.on_all_ranks(lambda: _replace(new, self.path) if first else None)
        except StateError:
            if first:
                shutil.rmtree(new, ignore_errors=True)
            raise

    def metadata(self, what: str) -> Metadata:
        """Return what the folder has, once it was compared with its checksums, a part of it on each rank.

        Args:
            what: the beginning of entries that have to be there.

        Raises:
            StateError: there is no such checkpoint, or it was damaged.
        """
        metadata = self.on_all_ranks(lambda: _read_metadata(self._there, what))
        ranks = 1 if self.watchdog is None else len(self.watchdog.members)
        self.on_all_ranks(lambda: refuse_damaged(self._there, self._rank, ranks))
        return metadata

    def read(self, state: dict[str, Any], late: bool = False) -> None:
        """Fill the tensors of a state in place, and replace its other values.

        Args:
            late: True if the caller's objects have changed by then.

        Raises:
            StateError: it can't be read.
        """
        self.on_all_ranks(lambda: _read(self._group, state, self._there), late)

    def on_all_ranks(self, work: Callable[[], T], late: bool = False) -> T:
        """Run something on this rank, and wait until all ranks have; an error of one is a StateError on all."""
        name = f"{self.name}, which has changed the model by now," if late else self.name
        error: BaseException | None = None
        result = None
        try:
            if self.watchdog is None:
                result = work()
            else:
                with self.watchdog.naming(name):
                    result = work()
        except CollectiveError:
            raise
        except (Exception, CheckpointException) as caught:  # a CheckpointException is no Exception
            error = caught
        reason = None if error is None else _reason(error)
        failures = all_failures(self.watchdog, reason, name) if self.watchdog else {0: reason} if reason else {}
        for rank, each in failures.items():
            raise StateError(f"the {name} has failed on rank {rank}: {each}") from error
        return cast(T, result)

    @property
    def _rank(self) -> int:
        return 0 if self.watchdog is None else self.watchdog.group.rank()

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return None if self.watchdog is None else self.watchdog.group

    @property
    def _there(self) -> Path:
        return _beside(self.path, "old") if _is_between_names(self.path) else self.path


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({_reason(each) for each, _ in error.failures.values()}))
    if isinstance(error, OSError) and str(error):
        return "; ".join(filter(None, (str(error), advice_for(error, ""))))
    message = isinstance(error, MemgraphError) and str(error)
    return message or f"{type(error).__name__}: {error}"


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def _clear(new: Path, path: Path) -> None:
    """Remove the new folder of an interrupted save, and give the old one its name back."""
    if path.exists() and not path.is_dir():
        raise StateError(f"{path} is no folder, so it is not replaced: name another")
    if path.exists() and any(path.iterdir()) and not (path / METADATA).exists():
        raise StateError(f"{path} is there and is no checkpoint, so it is not replaced: name another folder")
    old = _beside(path, "old")
    if _is_between_names(path):
        os.rename(old, path)
    for left in (new, old):
        if left.exists():
            shutil.rmtree(left)


def _is_between_names(path: Path) -> bool:
    """Return True if a save was killed after it had renamed the old folder and before it had renamed the new one.

    Without a new folder, the checkpoint was removed since, and the rest of the old one must not be loaded.
    """
    return not path.exists() and _beside(path, "old").exists() and _beside(path, "new").exists()


def _read_metadata(folder: Path, what: str) -> Metadata:
    try:
        metadata = Reader(folder).read_metadata()
    except NotADirectoryError as error:
        advice = "give a folder of save_sharded, or load a file with memgraph.load_state"
        raise StateError(f"{folder} is no folder; {advice}") from error
    except FileNotFoundError as error:
        raise StateError(f"there is no checkpoint in {folder}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise StateError(f"{folder / METADATA} is damaged: {error}") from error
    if not any(name.startswith(what) for name in metadata.state_dict_metadata):
        raise StateError(f"{folder} has no {what.partition('.')[0]!r} in it; save it with save_sharded")
    return metadata


class _Writer(FileSystemWriter):
    """Torch's writer, which raises the OSError behind torch's error about the length of a file."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def _write(group: dist.ProcessGroup | None, state: dict[str, Any], new: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed")
        save(state, storage_writer=_Writer(new), process_group=group)


def _read(group: dist.ProcessGroup | None, state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed")
        load(state, storage_reader=Reader(path), planner=Planner(), process_group=group)


def _replace(new: Path, path: Path) -> None:
    sync_folder(new)
    if not path.exists():
        os.rename(new, path)
    elif not _exchange_names(new, path):
        old = _beside(path, "old")
        os.rename(path, old)
        try:
            os.rename(new, path)
        except OSError:
            os.rename(old, path)
            raise
        new = old
    sync_folder(path.parent)
    if new.exists():
        shutil.rmtree(new)


def _exchange_names(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False if the file system can't."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)
