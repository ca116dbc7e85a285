"""Find damage in a saved file before any of it is loaded.

    checksum(f32[2, 8])                     ->  3523407757, from its dtype, shape and elements
    refuse_damaged_archive("run.pt", state) ->  StateError: 'model.fc.weight' was damaged since it was written

A checksum is a CRC-32: it detects every flipped bit, every run of damage up to 32 bits, and all but one in four billion
of other damage.  It does not protect against deliberate changes.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..errors import StateError

CHUNK = 1 << 20
FAULTS = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError)


def checksum(tensor: Tensor) -> int:
    """Return the checksum of a contiguous tensor in host memory."""
    kind = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return zlib.crc32(numbers(tensor), zlib.crc32(kind))


def numbers(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def refuse_damaged_archive(path: str | os.PathLike[str], state: object) -> None:
    """Compare a file of `torch.save` with the checksums in it; `state` is mapped from it.

    Raises:
        StateError: a part is damaged; names its tensor.
        OSError: the file can't be read.
    """
    with zipfile.ZipFile(path) as archive:
        parts = sorted(archive.infolist(), key=lambda part: part.header_offset)
        storages = [part.filename for part in parts if "/data/" in part.filename and part.file_size]
        for part in parts:
            if not _is_whole(archive, part):
                number = storages.index(part.filename) if part.filename in storages else None
                raise StateError(f"{_owner(state, number) or repr(part.filename)} was damaged since it was written")


def _is_whole(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(part) as content:
            while content.read(CHUNK):
                pass
    except FAULTS:  # which the standard library raises for a part that differs from its entry
        return False
    return True


def _owner(state: object, number: int | None) -> str | None:
    """Return the names of the tensors in a storage of the file; storages are numbered by offset."""
    if number is None:
        return None
    names: dict[int, list[str]] = {}
    for name, tensor in _named(state, ""):
        if tensor.layout == torch.strided and tensor.untyped_storage().nbytes():
            names.setdefault(tensor.untyped_storage().data_ptr(), []).append(repr(name))
    owners = [names[address] for address in sorted(names)]
    return ", ".join(owners[number]) if number < len(owners) else None


def _named(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _named(part, f"{name}.{i}" if name else str(i))
