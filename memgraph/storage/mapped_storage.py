"""Map tensors of the state from a tier, so that they stay ordinary tensors for everyone else.

Before:                              After:
    p.data    100 MB of RAM              p.data    mapped from an unnamed file, shared with it
    opt.state[p]["exp_avg"]  too         opt.state[p]["exp_avg"]  too
                                         buffer_slice_of(p)  ->  file 7, bytes 0 to 104857600

A mapped tensor is an ordinary CPU tensor: it is read, written, saved and copied as any other. Its pages are not
anonymous memory: the kernel evicts them under pressure. Behind a GPU it is pinned memory (`pinned_storage.py`).

A step bypasses the page cache and uses the file and the offset. Linux keeps the two coherent: a direct read first
writes back dirty pages that it covers, and a direct write drops those pages, mapped ones included. That holds for two
accesses if one ends before the other begins, so while bytes move by the file nothing may write them by the mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..tensors.layout import is_dense, view_bytes_as
from .file_space import FileSpace, Space, file_space
from .spill_file import PAGE, SpillError, advice_for, whole_pages

SlotSize = tuple[int, int]  # offset, bytes
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


@dataclass(frozen=True)
class TensorSpec:
    """Layout of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Layouts = MappingType[str, TensorSpec]  # of tensors with names


@dataclass(frozen=True)
class BufferSlice:
    """Bytes of a mapping, from a page boundary on; those of a file of weights begin anywhere, and are only read.

    Whole pages may be written: the rest of the last page is unused. The mapping is referenced, so that it exists
    while bytes move.
    """

    offset: int
    nbytes: int
    mapping: FileBytes | CopySource

    def part(self, offset: int, nbytes: int) -> BufferSlice:
        """Return some of these bytes, from a page boundary on."""
        assert offset % PAGE == 0 and (nbytes % PAGE == 0 or offset + nbytes == self.nbytes)
        return replace(self, offset=self.offset + offset, nbytes=nbytes)

    def view_like(self, tensor: Tensor) -> Tensor:
        """View the bytes in host memory with the layout of `tensor`."""
        assert isinstance(self.mapping, Mapping)
        flat = torch.frombuffer(self.mapping, dtype=torch.uint8, count=self.nbytes, offset=self.offset)
        return view_bytes_as(flat, tensor)


class FileBytes(Protocol):
    """Bytes of a file at addresses, from which tensors are mapped."""

    def __len__(self) -> int: ...
    def unshare(self, base: int) -> None:
        """In a child of fork, stop writing to the parent's bytes; the mapping begins at address `base`."""

    def slice_at(self, offset: int, nbytes: int) -> BufferSlice | None:
        """Return the slice of a tensor that begins so many bytes behind `base`, if it is one."""


class OpenFile:
    """A file that bytes are copied from, or to; in memory or on a disk."""

    file: int
    in_memory: bool


class CopySource:
    """Bytes of the state that streams copy."""

    def reload(self, place: BufferSlice, tensor: Tensor, after: Sequence[Any] = ()) -> Any:
        """Begin to fill `tensor`, once `after` have ended."""
        raise NotImplementedError

    def offload(self, place: BufferSlice, tensor: Tensor) -> Any:
        """Begin to copy `tensor` there."""
        raise NotImplementedError


class BufferAllocator:
    """Allocates mappings anywhere but in a folder."""

    def map(self, slots: Iterable[SlotSize]) -> Mapping:
        """Allocate a mapping with room for the slots."""
        raise NotImplementedError


BufferLocation = BufferAllocator | Space  # a folder, None for the default one


class MappedBuffer:
    """A mapping with a slice for each tensor. It exists as long as a tensor over it, a slice, or this object."""

    def __init__(self, specs: Sequence[TensorSpec], location: BufferLocation) -> None:
        """
        Raises:
            SpillError: the folder has no space for them.
            PinnedError: the host has none.
            ValueError: a tensor would have gaps between its elements, or overlap itself.
        """
        for spec in specs:
            if not is_dense(torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")):
                raise ValueError(f"a buffer takes dense tensors, not shape {spec.shape} with strides {spec.strides}")
        self.specs = tuple(specs)
        *self.offsets, self.nbytes = accumulate((whole_pages(spec.nbytes) for spec in specs), initial=0)
        slots = [(at, spec.nbytes) for at, spec in zip(self.offsets, specs, strict=True)]
        self.mapping = (
            location.map(slots)
            if isinstance(location, BufferAllocator)
            else FileMapping.of(file_space(location), slots)
        )

    def tensor(self, index: int) -> Tensor:
        """Return a tensor over the slice at `index`; zeros until something is written there."""
        spec = self.specs[index]
        if not spec.nbytes:
            return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=self.mapping.device)
        # A storage of its own: to save or copy one tensor must not take the whole mapping.
        flat = self.mapping.bytes_at(self.offsets[index], spec.nbytes)
        empty = torch.empty(0, dtype=spec.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), 0, spec.shape, spec.strides)

    def slice(self, index: int) -> BufferSlice:
        return BufferSlice(self.offsets[index], self.specs[index].nbytes, self.mapping)


class Mapping(mmap.mmap):
    """Memory with room for slots, each an offset and bytes."""

    device = torch.device("cpu")  # of the tensors over it
    slots: list[SlotSize]  # that have any bytes

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """View some bytes on the device of the tensors over them."""
        return torch.frombuffer(self, dtype=torch.uint8, count=nbytes, offset=offset)

    def unshare(self, base: int) -> None:
        """In a child of fork, stop writing to the parent's bytes; the mapping begins at address `base`."""

    def slice_at(self, offset: int, nbytes: int) -> BufferSlice | None:
        """Return a slot, or a part of one that begins at a page, and ends at one or where the slot does."""
        end = offset + nbytes
        slot = bisect_right(self.slots, offset, key=lambda slot: slot[0]) - 1
        slot_end = sum(self.slots[slot])
        whole = offset % PAGE == 0 and (end == slot_end or (end < slot_end and end % PAGE == 0))
        return BufferSlice(offset, nbytes, self) if whole else None

    def register(self, slots: list[SlotSize]) -> None:
        """Let `buffer_slice_of` find tensors over this mapping."""
        self.slots = slots
        open_mappings[self.bytes_at(0, 1).data_ptr()] = self


class FileMapping(Mapping, OpenFile):
    """A mapped file, which is closed when nothing references the mapping any more."""

    @classmethod
    def of(cls, space: FileSpace, slots: Iterable[SlotSize]) -> FileMapping:
        """Map a new unnamed file with room for the slots."""
        nonempty, nbytes = page_layout(slots)
        file = space.open(nbytes, "the state")
        try:
            mapping = cls(file, nbytes)
        except OSError as error:  # of memory, or of files: a mapping has one of its own
            os.close(file)
            message = f"cannot map {nbytes} bytes of a file for the state in {space}: {error}"
            advice = advice_for(error, "see that the process may map more memory (ulimit -v, vm.max_map_count)")
            raise SpillError(f"{message}; {advice}") from error
        mapping.file, mapping.in_memory = file, space.in_memory(file)
        mapping.register(nonempty)
        return mapping

    def unshare(self, base: int) -> None:
        writable, private, fixed = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, 0x10
        if LIBC.mmap(base, len(self), writable, private | fixed, self.file, 0) != base:
            raise OSError(ctypes.get_errno(), "offloaded state can't be separated from that of the parent process")

    def __del__(self) -> None:
        # At the end of the process modules may be gone, and files are closed.
        if hasattr(self, "file") and os is not None:
            os.close(self.file)


def page_layout(slots: Iterable[SlotSize]) -> tuple[list[SlotSize], int]:
    """Return the slots that have any bytes, and the bytes of whole pages that they take."""
    nonempty = [slot for slot in slots if slot[1]]
    return nonempty, max((at + whole_pages(size) for at, size in nonempty), default=PAGE)


# Mutable state of the module, by address: any tensor may come in, and only its address tells where it was mapped.
open_mappings: weakref.WeakValueDictionary[int, FileBytes] = weakref.WeakValueDictionary()


def _unshare_all() -> None:
    """Turn the parent's offloaded tensors into ordinary memory of the child."""
    for base, mapping in list(open_mappings.items()):
        mapping.unshare(base)
    open_mappings.clear()


os.register_at_fork(after_in_child=_unshare_all)


def buffer_slice_of(tensor: Tensor) -> BufferSlice | None:
    """Return the slice of a mapping that a tensor covers, or None.

    A part of a slot counts if it begins at a page, and ends at one or where the slot does. Any other part has to be
    read and written as the ordinary memory that it is.
    """
    if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided or not tensor.nbytes or not is_dense(tensor):
        return None
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    for base, mapping in list(open_mappings.items()):
        if base <= address < base + len(mapping):
            return mapping.slice_at(address - base, nbytes)
    return None


def is_offloaded(tensor: Tensor) -> bool:
    """Return True if a tensor covers a slice of a mapping; a fake tensor never does."""
    return bool(open_mappings) and buffer_slice_of(tensor) is not None


def tensor_spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
