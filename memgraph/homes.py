"""Let tensors of the state lie on disk while they stay what they are to everybody else.

Before:                              After:
    p.data    100 MB of RAM              p.data    mapped from a file without a name, shared with it
    opt.state[p]["exp_avg"]  too         opt.state[p]["exp_avg"]  too
                                         place_of(p)  ->  file 7, bytes 0 to 104857600

A mapped tensor is an ordinary CPU tensor: it is read, written, saved and copied as any other. The kernel keeps its
pages as long as it likes and gives them up under pressure; they are no anonymous memory.

The step goes past the page cache, by the file and the offset. Linux keeps the two coherent by itself: a direct read
first writes back what is dirty in the pages it covers, and a direct write drops those pages, mapped ones included. That
holds for any two accesses of which one ends before the other begins, so whoever moves bytes by the file must know that
nobody writes them by the mapping meanwhile.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .spill import PAGE, nameless_file, pages


@dataclass(frozen=True)
class Form:
    """What a place must know of the tensor it is for."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor lie: `nbytes` of a file from `offset` on, which begins a page.

    Whole pages may be written there: what is beyond `nbytes` in the last one is nobody's. The mapping is held so that
    the file stays open while bytes move.
    """

    file: int
    offset: int
    nbytes: int
    mapping: Mapping


class Home:
    """Room on disk for some tensors. The file lives as long as a tensor over it, a place in it, or this object."""

    def __init__(self, forms: Sequence[Form], folder: str | os.PathLike[str]) -> None:
        """
        Raises:
            SpillError: the folder has no room for them.
            ValueError: a form leaves gaps between its elements, or lays several on one place.
        """
        for form in forms:
            if not is_dense(torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")):
                raise ValueError(f"a home takes dense tensors, not shape {form.shape} with strides {form.strides}")
        self.forms = tuple(forms)
        *self.offsets, nbytes = accumulate((pages(form.nbytes) for form in forms), initial=0)
        self.nbytes = nbytes
        self.mapping = Mapping.of(
            Path(folder), [(at, form.nbytes) for at, form in zip(self.offsets, forms, strict=True)]
        )

    def tensor(self, index: int) -> Tensor:
        """A tensor over the place at `index`; all zeros until something is written there."""
        form = self.forms[index]
        if not form.nbytes:
            return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="cpu")
        # A storage of its own: whoever saves or copies one tensor must not get the whole file.
        count = torch.Size(form.shape).numel()
        flat = torch.frombuffer(self.mapping, dtype=form.dtype, count=count, offset=self.offsets[index])
        return torch.empty(0, dtype=form.dtype, device="cpu").set_(flat.untyped_storage(), 0, form.shape, form.strides)

    def place(self, index: int) -> Place:
        return Place(self.mapping.file, self.offsets[index], self.forms[index].nbytes, self.mapping)


class Mapping(mmap.mmap):
    """A file in memory, which closes the file when nobody refers to it any more."""

    file: int
    slots: list[tuple[int, int]]  # offset and bytes of each place that has some

    @classmethod
    def of(cls, folder: Path, slots: Iterable[tuple[int, int]]) -> Mapping:
        """Map a new nameless file with room for the slots, each an offset and bytes."""
        laid = [slot for slot in slots if slot[1]]
        nbytes = max((at + pages(size) for at, size in laid), default=PAGE)
        file = nameless_file(folder, nbytes, "the state")
        try:
            mapping = cls(file, nbytes)
        except BaseException:
            os.close(file)
            raise
        mapping.file, mapping.slots = file, laid
        _mappings[_address(mapping)] = mapping
        return mapping

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)


_mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()


def place_of(tensor: Tensor) -> Place | None:
    """Where a tensor lies in a home, or None.

    A part of a place has a place too, if it begins a page and ends one, or ends where the place does. Anything else in
    a home is to be read and written as the ordinary memory that it is.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.nbytes or not is_dense(tensor):
        return None
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    for base, mapping in list(_mappings.items()):
        if base <= address < base + len(mapping):
            return _within(mapping, address - base, nbytes)
    return None


def is_far(tensor: Tensor) -> bool:
    """Whether a tensor lies in a home; a fake one does not."""
    return bool(_mappings) and not isinstance(tensor, FakeTensor) and place_of(tensor) is not None


def _within(mapping: Mapping, offset: int, nbytes: int) -> Place | None:
    end = offset + nbytes
    slot = bisect_right(mapping.slots, offset, key=lambda slot: slot[0]) - 1
    until = sum(mapping.slots[slot])
    whole = offset % PAGE == 0 and (end == until or (end < until and end % PAGE == 0))
    return Place(mapping.file, offset, nbytes, mapping) if whole else None


def form_of(tensor: Tensor) -> Form:
    return Form(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one run of memory, each its own part of it."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _address(mapping: Mapping) -> int:
    return torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
