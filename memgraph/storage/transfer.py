"""Move bytes between a home on disk and memory, while the caller goes on.

Before:                                   After:
    tensor.copy_(mapped[range])               copy = fetch(place, tensor)   # two threads read
    ...  # page faults, one by one            ...                           # other work meanwhile
                                              copy.end()                    # the bytes are there

Both ways go past the page cache. A copy holds the file and the tensor until it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from .async_copy import Copy, CopyChunk, CopyFunction, finish_copies
from .io_threads import read, write
from .mapped_storage import (
    BufferLocation,
    BufferSlice,
    CopySource,
    FileMapping,
    MappedBuffer,
    buffer_slice_of,
    tensor_spec_of,
)
from .pinned_storage import StreamCopy
from .spill_file import PAGE

PendingCopy = Copy | StreamCopy


def begin_reload(tensors: Sequence[Tensor], where: BufferLocation) -> list[Tensor]:
    """The same values, in a new home; a tensor that has a place is left where it is.

    Raises:
        SpillError: the disk does not give or take the bytes. No tensor has changed.
        PinnedError: the host does not give them.
    """
    strangers = [tensor.detach() for tensor in tensors if buffer_slice_of(tensor) is None]
    if not strangers:
        return list(tensors)
    home = MappedBuffer([tensor_spec_of(tensor) for tensor in strangers], where)
    wait_all([offload_slices(home.slice(i), tensor) for i, tensor in enumerate(strangers) if tensor.nbytes])
    mapped = iter([home.tensor(i) for i in range(len(strangers))])
    return [next(mapped) if buffer_slice_of(tensor) is None else tensor for tensor in tensors]


def slice_of(place: BufferSlice, begin: int, nbytes: int) -> BufferSlice:
    """Bytes of a place from `begin` on, which begin a page and end one, or with the place."""
    assert begin % PAGE == 0 and (begin + nbytes == place.nbytes or nbytes % PAGE == 0)
    return replace(place, offset=place.offset + begin, nbytes=nbytes)


def reload_slices(place: BufferSlice, tensor: Tensor, after: Sequence[Any] = ()) -> PendingCopy:
    """Begin to fill `tensor` from its home, once `after` have ended; if one of those failed, it is left alone."""
    if isinstance(place.mapping, CopySource):
        return place.mapping.reload(place, tensor, after)
    return _begin(read, place, tensor, after)


def offload_slices(place: BufferSlice, tensor: Tensor) -> PendingCopy:
    """Begin to copy `tensor` to its home. It must not change until the copy has ended."""
    if isinstance(place.mapping, CopySource):
        return place.mapping.offload(place, tensor)
    return _begin(write, place, tensor)


def wait_all(copies: Iterable[PendingCopy]) -> None:
    """Wait until all have ended, and raise what one of them met.

    Raises:
        SpillError: the disk failed.
    """
    copies = list(copies)
    finish_copies(*copies)  # all of them first, so that none is at a tensor when the caller hears of another
    for copy in copies:
        copy.end()


def _begin(move: CopyFunction, place: BufferSlice, tensor: Tensor, after: Sequence[CopyChunk] = ()) -> Copy:
    assert isinstance(place.mapping, FileMapping)
    copy = Copy(move, (place.mapping.file, place.offset, place.nbytes), tensor, "of the state")
    copy.begin(partial(_held, place, tensor), after)
    return copy


def _held(place: BufferSlice, tensor: Tensor, part: CopyChunk) -> None:
    """Nothing is against a copy whose file and tensor are held."""
