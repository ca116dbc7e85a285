"""Let activations lie in pinned host memory between forward and backward.  Not yet run on a GPU.

    lease.offload(0, a)     the `out` stream copies a, behind what computes it
    lease.free(0); del a    the compute stream waits for the copy; whatever takes a's bytes next comes behind it
    a = empty(...)          from the compute stream's pool
    lease.reload(0, a)      the `back` stream copies, behind whatever had those bytes
    lease.wait(0)           the compute stream waits for the copy

One stream per direction for the life of the process.  No tensor is used on a stream while it could be freed on another,
so nothing is recorded with the allocator: the graph holds what is copied out until `free` and what is copied back from
before `reload` until `wait`, and the lease does as well, should the graph be left in the middle.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..tensors.layout import view_bytes_as
from .async_copy import CopiedBytes
from .mapped_storage import BufferSlice
from .pinned_pool import PINNED_POOL, PinnedBlock, PinnedPool
from .spill_file import PAGE

ALIGNED = 256  # bytes, at a multiple of which a slot begins: less than 1 % is lost on the smallest value that is sent
Copying = tuple[Any, Tensor]  # the event at the end of a copy, and the tensor on the device


class PinnedTier:
    """Room in pinned memory for the activations of a step; `slots` are their bytes.

    `cuda` is torch.cuda, or what has its streams and events; `cap` is the most that its steps may have pinned in all.
    """

    staging = 0  # copies go straight between the device and the slab

    def __init__(
        self, slots: Sequence[int], device: torch.device, cuda: Any = torch.cuda, slabs: PinnedPool = PINNED_POOL,
        cap: int | None = None,
    ) -> None:  # fmt: skip
        self.slots, self.device, self.cuda, self.slabs, self.cap = tuple(slots), device, cuda, slabs, cap
        *self.offsets, nbytes = accumulate((-(-slot // ALIGNED) * ALIGNED for slot in slots), initial=0)
        self.nbytes = max(nbytes, PAGE)
        self.homes: Mapping[int, BufferSlice] = {}
        self.closed = True
        slabs.reserve(self.nbytes, device, cap)
        self.closed = False

    def bind(self, homes: Mapping[int, BufferSlice]) -> None:
        """Let slots be where tensors of the state live: there is always something to reload, and an offload stays."""
        self.homes = homes

    def lease(self) -> PinnedLease:
        """Room for one step in flight.

        Raises:
            PinnedError: several are, and one more slab would be too much.
        """
        slab = self.slabs.lend(self.nbytes, self.device, self.cap)
        for event in slab.after:  # copies come behind the compute stream, and that behind who had the slab
            self.cuda.current_stream(self.device).wait_event(event)
        return PinnedLease(self, slab)

    def close(self) -> None:
        """This tier needs its slab no more; a lease that is out keeps its own."""
        if not self.closed:
            self.closed = True
            self.slabs.forget(self.nbytes, self.device)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the pages go with the process
            self.close()


class PinnedLease:
    """One step's room: a slab, and what is being copied."""

    def __init__(self, tier: PinnedTier, slab: PinnedBlock) -> None:
        self.tier, self.cuda, self.device = tier, tier.cuda, tier.device
        self.slab: PinnedBlock | None = slab
        self.gone: dict[int, Any] = {}  # by slot, the event at the end of the copy out
        self.leaving: dict[int, Copying] = {}
        self.coming: dict[int, Copying] = {}
        self.last: dict[Any, Any] = {}  # by stream, the event at its end
        self.moved: CopiedBytes = {}  # events keep no times
        self.homes = tier.homes  # as they are now: a later step may find the state elsewhere

    def bind(self, homes: Mapping[int, BufferSlice]) -> None:
        """Let slots be elsewhere than the tier was told."""
        self.homes = {**self.homes, **homes}

    def offload(self, slot: int, tensor: Tensor) -> None:
        out, _ = copy_streams(self.cuda, self.device)
        self.gone[slot] = self._copy(out, self._part(slot, tensor), tensor)
        self.leaving[slot] = self.gone[slot], tensor

    def free(self, slot: int) -> None:
        event, _ = self.leaving.pop(slot)
        self.cuda.current_stream(self.device).wait_event(event)

    def reload(self, slot: int, tensor: Tensor) -> None:
        _, back = copy_streams(self.cuda, self.device)
        if slot in self.gone or slot not in self.homes:
            back.wait_event(self.gone[slot])
        self.coming[slot] = self._copy(back, tensor, self._part(slot, tensor)), tensor

    def wait(self, slot: int) -> None:
        event, _ = self.coming.pop(slot)
        self.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        """Let what comes behind on the compute stream wait for all that is being copied, and later copies for that: as
        the end of a recording wants, whose events mean nothing beyond it."""
        used, self.last = self.last, {}
        done = self.cuda.Event()  # which nobody has recorded, so that nobody waits for it
        self.gone = dict.fromkeys(self.gone, done)
        self.leaving = {slot: (done, tensor) for slot, (_, tensor) in self.leaving.items()}
        self.coming = {slot: (done, tensor) for slot, (_, tensor) in self.coming.items()}
        for stream in used:
            self.cuda.current_stream(self.device).wait_stream(stream)

    def release(self) -> None:
        """Give the slab back.  The host waits only for what nobody waits for any more, of a step that failed."""
        slab, self.slab = self.slab, None
        if slab is not None:
            for event, _ in (*self.leaving.values(), *self.coming.values()):
                event.synchronize()
            self.leaving.clear()
            self.coming.clear()
            slab.after = tuple(self.last.values())
            self.tier.slabs.take_back(slab)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()

    def _part(self, slot: int, tensor: Tensor) -> Tensor:
        """The place of a slot in the slab, with the tensor's type, shape and strides."""
        if self.slab is None:
            raise ValueError("this lease is released")
        if home := self.homes.get(slot):
            return home.like(tensor)
        begin = self.tier.offsets[slot]
        return view_bytes_as(self.slab.bytes[begin : begin + self.tier.slots[slot]], tensor)

    def _copy(self, stream: Any, into: Tensor, of: Tensor) -> Any:
        self.last[stream] = event = copy_on_stream(self.cuda, self.device, stream, into, of)
        return event


def copy_on_stream(cuda: Any, device: torch.device, stream: Any, into: Tensor, of: Tensor) -> Any:
    """Have a stream copy, behind all that the current one has to do; the event at the end of it."""
    stream.wait_stream(cuda.current_stream(device))
    return record_event(cuda, stream, into, of)


def record_event(cuda: Any, stream: Any, into: Tensor, of: Tensor) -> Any:
    """Have a stream copy, behind what it has to do itself; the event at the end of it."""
    with cuda.stream(stream):
        into.copy_(of, non_blocking=True)
        event = cuda.Event()
        event.record(stream)
    return event


@functools.cache
def copy_streams(cuda: Any, device: torch.device) -> tuple[Any, Any]:
    """The streams of copies out and back, the same for the life of the process."""
    return cuda.Stream(device), cuda.Stream(device)


@functools.cache
def extra_streams(cuda: Any, device: torch.device) -> tuple[Any, Any]:
    """Two more, for copies that need not come behind those."""
    return cuda.Stream(device), cuda.Stream(device)


@functools.cache
def pinned_speed(device: torch.device, nbytes: int = 64 << 20, line: int = 1) -> tuple[float, float]:
    """Bytes per microsecond out to pinned memory and back, measured; `line` copies stand one behind the other."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device)  # of the device, which need not be the current one
    return nbytes / _copy_us(stream, host, there, line), nbytes / _copy_us(stream, there, host, line)


def _copy_us(stream: torch.cuda.Stream, into: Tensor, of: Tensor, line: int) -> float:
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        for _ in range(line):
            into.copy_(of, non_blocking=True)
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / line)
    return min(times)
