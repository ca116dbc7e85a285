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

from .mapped_storage import BufferAllocator, BufferSlice, Mapping, SlotSize, Source, taken_nbytes
from .pinned_pool import OWN, PINNED_POOL, PinnedError, PinnedPool
from .pinned_tier import copy_on_stream, copy_streams


@dataclass(frozen=True, eq=False)
class PinnedBufferAllocator(BufferAllocator):
    """Pinned memory behind a device; `cuda` is torch.cuda, or what has its streams and events; `cap` is the most that
    may be pinned in all when some is asked for here."""

    device: torch.device
    cuda: Any = torch.cuda
    slabs: PinnedPool = PINNED_POOL
    cap: int | None = None

    def mapped(self, slots: Iterable[SlotSize]) -> PinnedMapping:
        """
        Raises:
            PinnedError: there would be more pinned memory than is allowed, or the host does not pin it.
        """
        laid, nbytes = taken_nbytes(slots)
        self.slabs.claim(nbytes, self.cap)
        try:
            mapping = PinnedMapping(-1, nbytes, flags=OWN)
            mapping.madvise(mmap.MADV_DONTFORK)  # for the reason in `slab.py`
            why = self.slabs.pins.register(mapping.seen(0, nbytes), self.device)
            if why:
                raise PinnedError(
                    f"{nbytes} bytes of host memory for the state can't be pinned ({why}); allow the process more "
                    "locked memory (ulimit -l), or plan with offload=None"
                )
        except BaseException:
            self.slabs.claim(-nbytes)
            raise
        mapping.host, mapping.device = self, self.device
        mapping.known(laid)
        return mapping


class AfterEvent(Protocol):
    """A copy that another one has to come behind."""

    event: Any


class PinnedMapping(Mapping, Source):
    """Pinned memory, which is given back when nobody refers to it any more."""

    host: PinnedBufferAllocator

    def seen(self, offset: int, nbytes: int) -> Tensor:
        flat = super().seen(offset, nbytes)
        return flat if self.device.type == "cpu" else torch.as_tensor(_Seen(flat), device=self.device)

    def fetched(self, place: BufferSlice, tensor: Tensor, after: Sequence[AfterEvent] = ()) -> StreamCopy:
        return StreamCopy(self.host, copy_streams(self.host.cuda, self.device)[1], tensor, place.like(tensor), after)

    def stored(self, place: BufferSlice, tensor: Tensor) -> StreamCopy:
        return StreamCopy(self.host, copy_streams(self.host.cuda, self.device)[0], place.like(tensor), tensor)

    def __del__(self) -> None:
        if hasattr(self, "host") and not sys.is_finalizing():  # then the pages go with the process
            self.host.slabs.pins.unregister(super().seen(0, len(self)))
            self.host.slabs.claim(-len(self))


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
        self.parts = (self,)

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
