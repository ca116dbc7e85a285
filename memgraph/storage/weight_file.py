"""Let a file of weights that the caller has mapped be the place of frozen parameters, so that nothing is copied.

    model = LlamaForCausalLM.from_pretrained(folder)    # each weight is mapped from model.safetensors
    kept = WeightFiles(); kept.keep({"w": weight})
    buffer_slice_of(weight)                             ->   model.safetensors, bytes 1048 to 4195352

The mapping is private: what is written to a weight is in memory alone, and the file does not have it.  So a weight that
anyone has written since is let go before a step reads it: the kernel tells which pages are no longer the file's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, UntypedStorage

from ..tensors.layout import is_dense
from .mapped_storage import LIBC, BufferSlice, OpenFile, SlotSize, open_mappings
from .spill_file import PAGE, SpillError, bypass_page_cache, is_ram

IN_MEMORY, SWAPPED, OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))  # bits of an entry of /proc/self/pagemap


@dataclass(frozen=True)
class _PrivateMapping:
    """A line of /proc/self/maps: addresses, the offset in the file, and which file."""

    begin: int
    end: int
    offset: int
    device: int
    inode: int
    path: str


@dataclass(eq=False)
class WeightFile(OpenFile):
    """A file from which weights are mapped at an address, opened for reading."""

    begin: int
    nbytes: int
    offset: int  # of the first byte that is mapped
    file: int
    path: str
    version: tuple[int, ...]
    weights: dict[SlotSize, UntypedStorage] = field(default_factory=dict)  # those kept there; memory lives as long
    in_memory = False

    def __len__(self) -> int:
        return self.nbytes

    def __del__(self) -> None:
        os.close(self.file)

    def unshare(self, base: int) -> None:
        """Do nothing: the mapping is private in a child of fork too."""

    def slice_at(self, offset: int, nbytes: int) -> BufferSlice | None:
        """Return the slice of a weight, or of a part of one, by its offset from the first address."""
        slots = sorted(self.weights)
        slot = bisect_right(slots, offset, key=lambda each: each[0]) - 1
        if slot < 0 or offset + nbytes > sum(slots[slot]):
            return None
        return BufferSlice(self.offset + offset, nbytes, self)

    def has(self, slot: SlotSize) -> bool:
        """Return True if the memory of a weight has the file's bytes."""
        begin, nbytes = self.begin + slot[0], slot[1]
        first, last = begin // PAGE, (begin + nbytes - 1) // PAGE
        flags = _page_entries(first, last - first + 1) & (SWAPPED | IN_MEMORY | OF_FILE)
        written = [first + i for i in np.flatnonzero((flags & SWAPPED != 0) | (flags == IN_MEMORY)).tolist()]
        # A page at an end may have been written by a neighbour.
        return all(page in (first, last) and self._has_part(page, begin, nbytes) for page in written)

    def require_unchanged(self) -> None:
        """
        Raises:
            SpillError: the file was written since.
        """
        if _version(os.fstat(self.file)) != self.version:
            raise SpillError(
                f"{self.path} was written since its weights were mapped, and a step would read other values than the "
                "model has: write to another file and rename it, or load the weights into memory"
            )

    def _has_part(self, page: int, begin: int, nbytes: int) -> bool:
        low, high = max(begin, page * PAGE), min(begin + nbytes, (page + 1) * PAGE)
        at = low - self.begin + self.offset
        with open(f"/proc/self/fd/{self.file}", "rb") as file:
            return os.pread(file.fileno(), high - low, at) == ctypes.string_at(low, high - low)


class WeightFiles:
    """The files that have the frozen parameters of one module."""

    def __init__(self) -> None:
        self.kept = set[tuple[WeightFile, SlotSize]]()

    def keep(self, weights: Mapping[str, Tensor]) -> set[str]:
        """Keep those weights in their files that were not written, and no others; return their names.

        Raises:
            SpillError: a file was written since.
        """
        found, mappings = dict[str, tuple[WeightFile, SlotSize]](), list[_PrivateMapping]()
        if any(tensor.nbytes for tensor in weights.values()):
            mappings = list(_private_mappings())
        for name, tensor in weights.items():
            if tensor.nbytes and is_dense(tensor) and (file := _file_of(tensor, mappings)) is not None:
                slot = tensor.data_ptr() - file.begin, tensor.nbytes
                if file.has(slot):
                    found[name] = file, slot
        kept = set(found.values())
        for file, slot in self.kept - kept:  # another module may have others of the same file
            file.weights.pop(slot, None)
        for name, (file, slot) in found.items():
            file.weights[slot] = weights[name].untyped_storage()
        self.kept = kept
        self._require_unchanged()
        return set(found)

    @property
    def are_whole(self) -> bool:
        """True if no weight was written since."""
        self._require_unchanged()
        return all(slot in file.weights and file.has(slot) for file, slot in self.kept)

    def _require_unchanged(self) -> None:
        for file in {file for file, _ in self.kept}:
            file.require_unchanged()


def forget_weight(tensor: Tensor, place: BufferSlice) -> None:
    """Let a weight go, if it is one, that will be written in memory."""
    if isinstance(place.mapping, WeightFile):
        place.mapping.weights.pop((tensor.data_ptr() - place.mapping.begin, tensor.nbytes), None)


def discard(tensors: Iterable[Tensor]) -> None:
    """Free the pages that were written of tensors that nothing uses any more, where they are mapped from a file.

    The memory is freed only with the whole mapping else.
    """
    mappings = list(_private_mappings())
    for tensor in tensors:
        if _mapping_of(tensor, mappings) is not None:
            first, end = -(-tensor.data_ptr() // PAGE) * PAGE, (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
            if first < end:
                LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def _mapping_of(tensor: Tensor, mappings: Sequence[_PrivateMapping]) -> _PrivateMapping | None:
    """Return that of the mappings, in the order of addresses, which has a tensor's bytes."""
    at = bisect_right(mappings, tensor.data_ptr(), key=lambda each: each.begin) - 1
    found = mappings[at] if at >= 0 else None
    return found if found is not None and tensor.data_ptr() + tensor.nbytes <= found.end else None


def _file_of(tensor: Tensor, mappings: Sequence[_PrivateMapping]) -> WeightFile | None:
    """Return the file on a disk from which a tensor is mapped, opened; None if there is none, or it can't be read."""
    if (mapping := _mapping_of(tensor, mappings)) is None:
        return None
    opened = open_mappings.get(mapping.begin)
    if isinstance(opened, WeightFile) and opened.version[:2] == (mapping.device, mapping.inode):
        return opened
    try:
        known = os.stat(mapping.path)
        is_same = (known.st_dev, known.st_ino) == (mapping.device, mapping.inode)  # it may have been replaced
        if not is_same or not stat.S_ISREG(known.st_mode) or is_ram(Path(mapping.path).parent):
            return None
        file = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    bypass_page_cache(file)
    size = mapping.end - mapping.begin
    opened = WeightFile(mapping.begin, size, mapping.offset, file, mapping.path, _version(known))
    open_mappings[mapping.begin] = opened
    return opened


def _private_mappings() -> Iterator[_PrivateMapping]:
    """Yield what is mapped privately from files, by address."""
    with open("/proc/self/maps", errors="replace") as lines:
        for line in lines:
            # 7f88d2200000-7f88d2a03000 rw-p 00000000 fe:00 3172747                    /data/model.safetensors
            addresses, access, offset, device, inode, *path = line.split(None, 5)
            if access[3] == "p" and inode != "0" and path:
                begin, end = (int(each, 16) for each in addresses.split("-"))
                number = os.makedev(*(int(each, 16) for each in device.split(":")))
                yield _PrivateMapping(begin, end, int(offset, 16), number, int(inode), path[0].rstrip("\n"))


def _page_entries(first: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return what the kernel says of pages of this process, from one on."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        return np.frombuffer(os.pread(file.fileno(), 8 * count, 8 * first), dtype=np.uint64)


def _version(known: os.stat_result) -> tuple[int, ...]:
    return known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns
