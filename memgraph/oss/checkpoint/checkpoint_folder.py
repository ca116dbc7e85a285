"""A checkpoint folder of several ranks, which is replaced whole or not at all.

    .run.new/    written beside the old one, and synced to disk    ->    run/

A rank's error is a `StateError` on all of them.

Read a folder of torch.distributed.checkpoint without running its pickles, and check its checksums.

    __0_0.distcp   rank 0's parts of tensors          as torch writes it
    .metadata      place of each part, pickled        as torch writes it
    __0.crc32      {"__0_0.distcp": [[0, 1705, 912559, "model.turned"], ...]}     offset, bytes, CRC-32, name

Torch's own reader unpickles `.metadata` and values that are no tensors, and a pickle may call any function. This one
allows only the classes that torch writes there.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...errors import CollectiveError, MemgraphError, StateError
from ...storage.spill_file import advice_for, sync_folder
from ..comm.rank_group import all_failures
from ..comm.watchdog import CollectiveWatchdog

T = TypeVar("T")
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants of Linux
METADATA, CHECKSUMS = ".metadata", "checksums"
CHUNK = 1 << 20
LISTED = "torch.distributed.checkpoint.metadata"
KNOWN = {
    *((LISTED, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((LISTED, f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (LISTED, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),  # where Python 3.13 has it
}
CONSTANTS = torch.dtype | torch.layout | torch.memory_format
Entry = list[Any]  # offset, bytes, CRC-32 and name of a part


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
        new, first = _beside(self.path, "new"), self.rank == 0
        self.on_all_ranks(lambda: _clear(new, self.path) if first else None)
        try:
            state = state | {CHECKSUMS: {str(self.rank): True}}
            self.on_all_ranks(lambda: _write(self._group, state, new))
            self.on_all_ranks(lambda: note_checksums(new, self.rank))
            self.on_all_ranks(lambda: _replace(new, self.path) if first else None)
        except BaseException:  # Ctrl-C too
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
        expected = [name for name in metadata.state_dict_metadata if name.startswith(f"{CHECKSUMS}.")]
        self.on_all_ranks(lambda: _refuse_missing(self._there, expected))
        self.on_all_ranks(lambda: refuse_damaged(self._there, self.rank, ranks))
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
            if isinstance(caught, CheckpointException) and self.watchdog is None:
                for cause, _ in caught.failures.values():
                    if isinstance(cause, KeyboardInterrupt):
                        raise cause from caught
            error = caught
        reason = None if error is None else _reason(error)
        failures = all_failures(self.watchdog, reason, name) if self.watchdog else {0: reason} if reason else {}
        for rank, each in failures.items():
            raise StateError(f"the {name} has failed on rank {rank}: {each}") from error
        return cast(T, result)

    @property
    def rank(self) -> int:
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
    for each in path.iterdir() if path.exists() else ():
        if each.name != METADATA and not (each.name.startswith("__") and each.suffix in (".distcp", ".crc32")):
            raise StateError(f"{each} is no part of the checkpoint, which is replaced as a whole: put it elsewhere")
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
        raise StateError(f"there is no checkpoint in {folder}; give a folder of save_sharded") from error
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


class Reader(FileSystemReader):
    """Torch's reader, which allows only the classes of a checkpoint's metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = _Unpickler(io.BytesIO(Path(self._get_metadata_path(kwargs.get("rank"))).read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """Torch's planner, which loads only tensors, numbers, texts and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises an error if there is anything else in it
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of `KNOWN` or a constant of torch; a name with dots in it reaches nothing else."""
        if (module, name) in KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(constant := vars(torch).get(name), CONSTANTS):
            return constant
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there, and is not loaded")


def note_checksums(folder: Path, rank: int) -> None:
    """Write the checksums of this rank's files, once the folder is complete."""
    files: dict[str, list[Entry]] = {}
    for index, info in Reader(folder).read_metadata().storage_data.items():
        if info.relative_path.startswith(f"__{rank}_"):
            crc = _checksum(folder / info.relative_path, info.offset, info.length)
            files.setdefault(info.relative_path, []).append([info.offset, info.length, crc, index.fqn])
    if rank == 0:
        size = (folder / METADATA).stat().st_size
        files[METADATA] = [[0, size, _checksum(folder / METADATA, 0, size), METADATA]]
    with open(folder / f"__{rank}.crc32", "w") as file:
        json.dump(files, file)
        file.flush()
        os.fsync(file.fileno())


def _refuse_missing(folder: Path, expected: Iterable[str]) -> None:
    for name in expected:
        notes = folder / f"__{name.removeprefix(CHECKSUMS)[1:]}.crc32"
        if not notes.exists():
            raise StateError(f"{notes} is missing, so nothing tells whether the folder is as it was written")


def refuse_damaged(folder: Path, rank: int, ranks: int) -> None:
    """Compare this rank's share of the folder with its checksums; older folders have none."""
    for path, (offset, nbytes, crc, name) in list(_entries(folder))[rank::ranks]:
        if _checksum(path, offset, nbytes) != crc:
            raise StateError(f"{name!r} was damaged since it was written, in {path}; continue from an earlier one")


def _entries(folder: Path) -> Iterator[tuple[Path, Entry]]:
    for notes in sorted(folder.glob("__*.crc32")):
        try:
            files = json.loads(notes.read_bytes())
            listed = [(folder / name, entry) for name, each in sorted(files.items()) for entry in each]
            is_valid = all(
                len(entry) == 4 and all(isinstance(number, int) for number in entry[:3]) for _, entry in listed
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise StateError(f"{notes} was damaged since it was written: {error}") from error
        if not is_valid:
            raise StateError(f"{notes} was damaged since it was written")
        yield from listed


def _checksum(path: Path, offset: int, nbytes: int) -> int:
    """Return the CRC-32 of some bytes of a file, or of as many as it has."""
    crc = 0
    with open(path, "rb") as file:
        file.seek(max(offset, 0))
        while nbytes > 0 and (chunk := file.read(min(CHUNK, nbytes))):
            crc, nbytes = zlib.crc32(chunk, crc), nbytes - len(chunk)
    return crc
