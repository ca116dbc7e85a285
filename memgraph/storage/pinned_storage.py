"""Let tensors of the state lie in the host's pinned memory behind a GPU, which sees them there.  Not yet run on a GPU.

Before:                              After:
    p.data    100 MB of the GPU          p.data    a tensor of the GPU over 100 MB of pinned host memory
    opt.state[p]["exp_avg"]  too         opt.state[p]["exp_avg"]  too

The owner's tensor is one of the GPU as before: whatever reads or writes it does so over the link, slowly and rightly. A
step has the bytes copied by streams of their own instead, and everything that comes behind on the compute stream waits
for them.
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
    """Pinned memory behind a device; `cuda` is torch.cuda, or what has its streams and events; `cap` is the most that
    may be pinned in all when some is asked for here."""

    device: torch.device
    cuda: Any = torch.cuda
    pool: PinnedPool = PINNED_POOL
    cap: int | None = None

    def map(self, slots: Iterable[SlotSize]) -> PinnedMapping:
        """
        Raises:
            PinnedError: there would be more pinned memory than is allowed, or the host does not pin it.
        """
        laid, nbytes = page_layout(slots)
        self.pool.claim(nbytes, self.cap)
        try:
            mapping = PinnedMapping(-1, nbytes, flags=MMAP_FLAGS)
            mapping.madvise(mmap.MADV_DONTFORK)  # for the reason in `block.py`
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
        mapping.register(laid)
        return mapping


class AfterEvent(Protocol):
    """A copy that another one has to come behind."""

    event: Any


class PinnedMapping(Mapping, CopySource):
    """Pinned memory, which is given back when nobody refers to it any more."""

    host: PinnedBufferAllocator

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        flat = super().bytes_at(offset, nbytes)
        return flat if self.device.type == "cpu" else torch.as_tensor(_Seen(flat), device=self.device)

    def reload(self, place: BufferSlice, tensor: Tensor, after: Sequence[AfterEvent] = ()) -> StreamCopy:
        return StreamCopy(
            self.host, copy_streams(self.host.cuda, self.device)[1], tensor, place.view_like(tensor), after
        )

    def offload(self, place: BufferSlice, tensor: Tensor) -> StreamCopy:
        return StreamCopy(self.host, copy_streams(self.host.cuda, self.device)[0], place.view_like(tensor), tensor)

    def __del__(self) -> None:
        if hasattr(self, "host") and not sys.is_finalizing():  # then the pages go with the process
            self.host.pool.allocator.unregister(super().bytes_at(0, len(self)))
            self.host.pool.claim(-len(self))


class StreamCopy:
    """A copy on a stream, in one part. Who waits for it is the compute stream, and not the caller."""

    error: Exception | None = None

    def __init__(
        self, host: PinnedBufferAllocator, stream: Any, into: Tensor, of: Tensor, after: Sequence[AfterEvent] = ()
    ) -> None:
        for part in after:
            stream.wait_event(part.event)
        self.host, self.nbytes = host, into.nbytes
        self.tensors: tuple[Tensor, ...] = into, of
        self.event = self._begun(stream, into, of)
        self.chunks = (self,)

    def _begun(self, stream: Any, into: Tensor, of: Tensor) -> Any:
        return copy_on_stream(self.host.cuda, self.host.device, stream, into, of)

    def wait(self) -> None:
        self.host.cuda.current_stream(self.host.device).wait_event(self.event)

    def end(self) -> None:
        """Have what comes behind wait, then let the tensors go."""
        self.wait()
        self.tensors = ()


class _Seen:
    """Pinned bytes as a GPU sees them: at the same address."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.__cuda_array_interface__ = {
            "shape": (flat.nbytes,), "typestr": "|u1", "data": (flat.data_ptr(), False), "version": 3,
        }  # fmt: skip
