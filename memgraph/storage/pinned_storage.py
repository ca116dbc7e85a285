"""Map tensors of the state from pinned host memory behind a GPU, which can access it.

Before:                              After:
    p.data    100 MB of the GPU          p.data    a tensor of the GPU over 100 MB of pinned host memory
    opt.state[p]["exp_avg"]  too         opt.state[p]["exp_avg"]  too

The owner's tensor is on the GPU as before: other code reads or writes it over the link, slowly but correctly. A step
copies the bytes on streams of their own instead, and whatever follows on the compute stream waits for them.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .mapped_storage import BufferAllocator, BufferSlice, CopySource, Mapping, SlotSize, page_layout
from .pinned_pool import MMAP_FLAGS, PINNED_POOL, PinnedError, PinnedPool
from .pinned_tier import copy_on_stream, copy_streams


@dataclass(frozen=True, eq=False)
class PinnedBufferAllocator(BufferAllocator):
    """Pinned memory behind a device.

    `cuda` is torch.cuda, or a stand-in with its streams and events; `cap` bounds what the process may have pinned in
    all when this allocator asks for more.
    """

    device: torch.device
    cuda: Any = torch.cuda
    pool: PinnedPool = PINNED_POOL
    cap: int | None = None

    def map(self, slots: Iterable[SlotSize]) -> PinnedMapping:
        """
        Raises:
            PinnedError: there would be more pinned memory than is allowed, or the host does not pin it.
        """
        nonempty, nbytes = page_layout(slots)
        self.pool.claim(nbytes, self.cap)
        try:
            mapping = PinnedMapping(-1, nbytes, flags=MMAP_FLAGS)
            mapping.madvise(mmap.MADV_DONTFORK)  # for the reason in `pinned_pool.py`
            why = self.pool.allocator.register(mapping.bytes_at(0, nbytes), self.device)
            if why:
                raise PinnedError(
                    f"{nbytes} bytes of host memory for the state can't be pinned ({why}); allow the process more "
                    "locked memory (ulimit -l), or plan with offload=None"
                )
        except BaseException:
            self.pool.claim(-nbytes)
            raise
        mapping.host, mapping.device = self, self.device
        mapping.register(nonempty)
        return mapping


class AfterEvent(Protocol):
    """A copy that another one has to follow."""

    event: Any


class PinnedMapping(Mapping, CopySource):
    """Pinned memory, which is unpinned when nothing references it any more."""

    host: PinnedBufferAllocator

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        flat = super().bytes_at(offset, nbytes)
        return flat if self.device.type == "cpu" else torch.as_tensor(_DeviceArray(flat), device=self.device)

    def reload(self, place: BufferSlice, tensor: Tensor, after: Sequence[AfterEvent] = ()) -> StreamCopy:
        _, back = copy_streams(self.host.cuda, self.device)
        return StreamCopy(self.host, back, tensor, place.view_like(tensor), after)

    def offload(self, place: BufferSlice, tensor: Tensor) -> StreamCopy:
        out, _ = copy_streams(self.host.cuda, self.device)
        return StreamCopy(self.host, out, place.view_like(tensor), tensor)

    def __del__(self) -> None:
        if hasattr(self, "host") and not sys.is_finalizing():  # else the pages end with the process
            self.host.pool.allocator.unregister(super().bytes_at(0, len(self)))
            self.host.pool.claim(-len(self))


class StreamCopy:
    """A copy on a stream, in one chunk. The compute stream waits for it, and not the caller."""

    error: Exception | None = None

    def __init__(
        self, host: PinnedBufferAllocator, stream: Any, into: Tensor, of: Tensor, after: Sequence[AfterEvent] = ()
    ) -> None:
        for earlier in after:
            stream.wait_event(earlier.event)
        self.host, self.nbytes = host, into.nbytes
        self.tensors: tuple[Tensor, ...] = into, of
        self.event = self._start(stream, into, of)
        self.chunks = (self,)

    def _start(self, stream: Any, into: Tensor, of: Tensor) -> Any:
        return copy_on_stream(self.host.cuda, self.host.device, stream, into, of)

    def wait(self) -> None:
        self.host.cuda.current_stream(self.host.device).wait_event(self.event)

    def end(self) -> None:
        """Let the compute stream wait, then release the tensors."""
        self.wait()
        self.tensors = ()


class _DeviceArray:
    """Pinned bytes as a GPU addresses them."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.__cuda_array_interface__ = {
            "shape": (flat.nbytes,), "typestr": "|u1", "data": (flat.data_ptr(), False), "version": 3,
        }  # fmt: skip
