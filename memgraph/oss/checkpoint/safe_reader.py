"""A folder of torch.distributed.checkpoint, read without running what is in it, and with a checksum of each part.

    __0_0.distcp   rank 0's parts of tensors          as torch writes it
    .metadata      which part lies where, pickled     as torch writes it
    __0.crc32      {"__0_0.distcp": [[0, 1705, 912559, "model.turned"], ...]}     offset, bytes, CRC-32, name

Torch's own reader unpickles `.metadata` and numbers that are no tensors, and a pickle may call whatever it likes. Here
only the classes that torch writes there are found.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from ...errors import StateError

METADATA = ".metadata"  # where torch keeps what is in a folder
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
Entry = list[Any]  # offset, bytes, CRC-32 and name of what lies there


class Reader(FileSystemReader):
    """Torch's own, which finds no classes but those that belong there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is in the folder.

        Raises:
            FileNotFoundError: there is nothing.
            pickle.UnpicklingError: there is something in it that does not belong there.
        """
        found = _Unpickler(io.BytesIO(Path(self._get_metadata_path(kwargs.get("rank"))).read_bytes())).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(found).__name__}")
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


class Planner(DefaultLoadPlanner):
    """Torch's own, which takes nothing but tensors, numbers, texts and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises an error if there is more in it than that
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A class, or a constant of torch's; names with dots in them are no way to anything else."""
        if (module, name) in KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := vars(torch).get(name), CONSTANTS):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there, and is not looked at")


def note_checksums(folder: Path, rank: int) -> None:
    """Write down what the files of this rank are, once the folder is complete."""
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


def refuse_damaged(folder: Path, rank: int, ranks: int) -> None:
    """Compare this rank's share of the folder with its checksums; an older one has none.

    Raises:
        StateError: something was damaged since it was written; says what.
    """
    for path, (offset, nbytes, crc, name) in list(_entries(folder))[rank::ranks]:
        if _checksum(path, offset, nbytes) != crc:
            raise StateError(f"{name!r} was damaged since it was written, in {path}; go on from an earlier one")


def _entries(folder: Path) -> Iterator[tuple[Path, Entry]]:
    for notes in sorted(folder.glob("__*.crc32")):
        try:
            files = json.loads(notes.read_bytes())
            listed = [(folder / name, entry) for name, each in sorted(files.items()) for entry in each]
            well = all(len(entry) == 4 and all(isinstance(number, int) for number in entry[:3]) for _, entry in listed)
        except (ValueError, TypeError, AttributeError) as error:
            raise StateError(f"{notes} was damaged since it was written: {error}") from error
        if not well:
            raise StateError(f"{notes} was damaged since it was written")
        yield from listed


def _checksum(path: Path, offset: int, nbytes: int) -> int:
    """That of some bytes of a file, or of as many as there are."""
    crc = 0
    with open(path, "rb") as file:
        file.seek(max(offset, 0))
        while nbytes > 0 and (chunk := file.read(min(CHUNK, nbytes))):
            crc, nbytes = zlib.crc32(chunk, crc), nbytes - len(chunk)
    return crc
