"""Read a folder of torch.distributed.checkpoint without running its pickles, and check its checksums.

    __0_0.distcp   rank 0's parts of tensors          as torch writes it
    .metadata      place of each part, pickled        as torch writes it
    __0.crc32      {"__0_0.distcp": [[0, 1705, 912559, "model.turned"], ...]}     offset, bytes, CRC-32, name

Torch's own reader unpickles `.metadata` and values that are no tensors, and a pickle may call any function. This one
allows only the classes that torch writes there.
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

METADATA = ".metadata"
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
