"""Let tensors of the state lie in the far tier while they stay what they are to everybody else.

Before:                              After:
    p.data    100 MB of RAM              p.data    mapped from a file without a name, shared with it
    opt.state[p]["exp_avg"]  too         opt.state[p]["exp_avg"]  too
                                         place_of(p)  ->  file 7, bytes 0 to 104857600

A mapped tensor is an ordinary CPU tensor: it is read, written, saved and copied as any other. The kernel keeps its
pages as long as it likes and gives them up under pressure; they are no anonymous memory.

Behind a GPU it is pinned memory that the device sees as well: see `host.py`.

A step goes past the page cache, by the file and the offset. Linux keeps the two coherent by itself: a direct read
first writes back what is dirty in the pages it covers, and a direct write drops those pages, mapped ones included. That
holds for any two accesses of which one ends before the other begins, so whoever moves bytes by the file must know that
nobody writes them by the mapping meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..tensors.layout import is_dense, view_bytes_as
from .spill_file import PAGE, SpillError, advice_for, nameless_file, pages, spill_folder

SlotSize = tuple[int, int]  # offset, bytes
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


@dataclass(frozen=True)
class TensorSpec:
    """What a place must know of the tensor it is for."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class BufferSlice:
    """Where the bytes of a tensor lie: `nbytes` of a mapping from `offset` on, which begins a page.

    Whole pages may be written there: what is beyond `nbytes` in the last one is nobody's. The mapping is held so that
    it is there while bytes move.
    """

    offset: int
    nbytes: int
    mapping: Mapping | Source

    def like(self, tensor: Tensor) -> Tensor:
        """Its bytes in memory of the host, laid out as `tensor`."""
        assert isinstance(self.mapping, Mapping)
        flat = torch.frombuffer(self.mapping, dtype=torch.uint8, count=self.nbytes, offset=self.offset)
        return view_bytes_as(flat, tensor)


class Source:
    """What has bytes of the state, and streams that copy them."""

    def fetched(self, place: BufferSlice, tensor: Tensor, after: Sequence[Any] = ()) -> Any:
        """Begin to fill `tensor`, once `after` have ended."""
        raise NotImplementedError

    def stored(self, place: BufferSlice, tensor: Tensor) -> Any:
        """Begin to copy `tensor` there."""
        raise NotImplementedError


class BufferAllocator:
    """What has room for homes, other than a folder."""

    def mapped(self, slots: Iterable[SlotSize]) -> Mapping:
        """New room for the slots."""
        raise NotImplementedError


BufferLocation = BufferAllocator | str | os.PathLike[str] | None  # a folder, None for the usual one


class MappedBuffer:
    """Room in the far tier for some tensors. It lives as long as a tensor over it, a place in it, or this object."""

    def __init__(self, forms: Sequence[TensorSpec], where: BufferLocation) -> None:
        """
        Raises:
            SpillError: the folder has no room for them.
            PinnedError: the host has none.
            ValueError: a form leaves gaps between its elements, or lays several on one place.
        """
        for form in forms:
            if not is_dense(torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")):
                raise ValueError(f"a home takes dense tensors, not shape {form.shape} with strides {form.strides}")
        self.forms = tuple(forms)
        *self.offsets, nbytes = accumulate((pages(form.nbytes) for form in forms), initial=0)
        self.nbytes = nbytes
        slots = [(at, form.nbytes) for at, form in zip(self.offsets, forms, strict=True)]
        self.mapping = (
            where.mapped(slots) if isinstance(where, BufferAllocator) else FileMapping.of(spill_folder(where), slots)
        )

    def tensor(self, index: int) -> Tensor:
        """A tensor over the place at `index`; all zeros until something is written there."""
        form = self.forms[index]
        if not form.nbytes:
            return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=self.mapping.device)
        # A storage of its own: whoever saves or copies one tensor must not get all of the mapping.
        flat = self.mapping.seen(self.offsets[index], form.nbytes)
        empty = torch.empty(0, dtype=form.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), 0, form.shape, form.strides)

    def place(self, index: int) -> BufferSlice:
        return BufferSlice(self.offsets[index], self.forms[index].nbytes, self.mapping)


class Mapping(mmap.mmap):
    """Memory with room for slots, each an offset and bytes."""

    device = torch.device("cpu")  # of the tensors that lie there
    slots: list[SlotSize]  # those that have any bytes

    def seen(self, offset: int, nbytes: int) -> Tensor:
        """Some of its bytes as the owner of a tensor there sees them."""
        return torch.frombuffer(self, dtype=torch.uint8, count=nbytes, offset=offset)

    def part(self, base: int) -> None:
        """In a child of fork: let what is written at this address no longer be written for the parent as well."""

    def known(self, slots: list[SlotSize]) -> None:
        """From now on, tensors there have a place."""
        self.slots = slots
        _mappings[self.seen(0, 1).data_ptr()] = self


class FileMapping(Mapping):
    """A file in memory, which closes the file when nobody refers to it any more."""

    file: int

    @classmethod
    def of(cls, folder: Path, slots: Iterable[SlotSize]) -> FileMapping:
        """Map a new nameless file with room for the slots."""
        laid, nbytes = taken_nbytes(slots)
        file = nameless_file(folder, nbytes, "the state")
        try:
            mapping = cls(file, nbytes)
        except OSError as error:  # of memory, or of files: a mapping has one of its own
            os.close(file)
            advice = advice_for(error, "see that the process may map more memory (ulimit -v, vm.max_map_count)")
            raise SpillError(
                f"cannot map {nbytes} bytes of a file for the state in {folder}: {error}; {advice}"
            ) from error
        mapping.file = file
        mapping.known(laid)
        return mapping

    def part(self, base: int) -> None:
        writable, private, fixed = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, 0x10
        if LIBC.mmap(base, len(self), writable, private | fixed, self.file, 0) != base:
            raise OSError(ctypes.get_errno(), "a home cannot be parted from that of the parent")

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)


def taken_nbytes(slots: Iterable[SlotSize]) -> tuple[list[SlotSize], int]:
    """The slots that have any bytes, and the bytes of whole pages that they take."""
    laid = [slot for slot in slots if slot[1]]
    return laid, max((at + pages(size) for at, size in laid), default=PAGE)


_mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()


def _part() -> None:
    """A child of fork has homes of its own: it finds its parent's tensors in ordinary memory."""
    for base, mapping in list(_mappings.items()):
        mapping.part(base)
    _mappings.clear()


os.register_at_fork(after_in_child=_part)


def buffer_slice_of(tensor: Tensor) -> BufferSlice | None:
    """Where a tensor lies in a home, or None.

    A part of a place has a place too, if it begins a page and ends one, or ends where the place does. Anything else in
    a home is to be read and written as the ordinary memory that it is.
    """
    if tensor.layout != torch.strided or not tensor.nbytes or not is_dense(tensor):
        return None
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    for base, mapping in list(_mappings.items()):
        if base <= address < base + len(mapping):
            return _within(mapping, address - base, nbytes)
    return None


def is_offloaded(tensor: Tensor) -> bool:
    """Whether a tensor lies in a home; a fake one does not."""
    return bool(_mappings) and not isinstance(tensor, FakeTensor) and buffer_slice_of(tensor) is not None


def _within(mapping: Mapping, offset: int, nbytes: int) -> BufferSlice | None:
    end = offset + nbytes
    slot = bisect_right(mapping.slots, offset, key=lambda slot: slot[0]) - 1
    until = sum(mapping.slots[slot])
    whole = offset % PAGE == 0 and (end == until or (end < until and end % PAGE == 0))
    return BufferSlice(offset, nbytes, mapping) if whole else None


def tensor_spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
