"""Copy between mapped tensors and memory, while the caller continues.

Before:                                   After:
    tensor.copy_(mapped[range])               copy = reload_slices(place, tensor)   # two threads read
    ...  # page faults, one by one            ...                                   # other work meanwhile
                                              wait_all([copy])                      # the bytes are there

Both directions bypass the page cache. A copy references the file and the tensor until it has ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from .async_copy import Copy, CopyChunk, finish_copies
from .io_threads import CopyFunction, moves_in
from .mapped_storage import (
    BufferLocation,
    BufferSlice,
    CopySource,
    OpenFile,
    buffer_slice_of,
    tensor_spec_of,
)
from .pinned_storage import StreamCopy
from .places import Places, map_tensors
from .spill_file import PAGE

PendingCopy = Copy | StreamCopy


def offload_tensors(
    tensors: Sequence[Tensor], where: BufferLocation | Places, owners: Sequence[Hashable] = ()
) -> list[Tensor]:
    """Return mapped tensors with the same values; those that are offloaded already are returned as they are.

    Args:
        owners: of the tensors; each may have a location of its own.

    Raises:
        SpillError: the disk does not provide or take the bytes. No tensor has changed.
        PinnedError: the host does not provide them.
    """
    resident = [i for i, tensor in enumerate(tensors) if buffer_slice_of(tensor) is None]
    wanted = [owners[i] if owners else None for i in resident]
    mapped = map_tensors([tensor_spec_of(tensors[i]) for i in resident], where, wanted)
    wait_all(
        [
            offload_slices(slice, tensors[i].detach())
            for i, (_, slice) in zip(resident, mapped, strict=True)
            if tensors[i].nbytes
        ]
    )
    found = dict(zip(resident, (tensor for tensor, _ in mapped), strict=True))
    return [found.get(i, tensor) for i, tensor in enumerate(tensors)]


def slice_of(place: BufferSlice, begin: int, nbytes: int) -> BufferSlice:
    """Return bytes of a slice from `begin` on, which begin at a page and end at one, or with the slice."""
    assert begin % PAGE == 0 and (begin + nbytes == place.nbytes or nbytes % PAGE == 0)
    return replace(place, offset=place.offset + begin, nbytes=nbytes)


def reload_slices(place: BufferSlice, tensor: Tensor, after: Sequence[Any] = ()) -> PendingCopy:
    """Begin to fill `tensor`, once `after` have ended; if one of those failed, it is left alone."""
    if isinstance(place.mapping, CopySource):
        return place.mapping.reload(place, tensor, after)
    return _begin(moves_of(place)[1], place, tensor, after)


def offload_slices(place: BufferSlice, tensor: Tensor) -> PendingCopy:
    """Begin to copy `tensor` out. It must not change until the copy has ended."""
    if isinstance(place.mapping, CopySource):
        return place.mapping.offload(place, tensor)
    return _begin(moves_of(place)[0], place, tensor)


def moves_of(place: BufferSlice) -> tuple[CopyFunction, CopyFunction]:
    """Return what copies to a file and from it."""
    assert isinstance(place.mapping, OpenFile)
    return moves_in(place.mapping.in_memory)


def wait_all(copies: Iterable[PendingCopy]) -> None:
    """Wait until all have ended.

    Raises:
        SpillError: the disk failed in one of them.
    """
    copies = list(copies)
    finish_copies(*copies)  # all of them first, so that no thread uses a tensor when the caller gets the error
    for copy in copies:
        copy.end()


def _begin(move: CopyFunction, place: BufferSlice, tensor: Tensor, after: Sequence[CopyChunk] = ()) -> Copy:
    assert isinstance(place.mapping, OpenFile)
    copy = Copy(move, (place.mapping.file, place.offset, place.nbytes), tensor, "of the state")
    copy.begin(partial(_keep_alive, place, tensor), after)
    return copy


def _keep_alive(place: BufferSlice, tensor: Tensor, chunk: CopyChunk) -> None:
    """A guard that references file and tensor, and never prevents the copy."""
