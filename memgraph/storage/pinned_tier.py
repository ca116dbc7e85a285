"""Keep activations in pinned host memory between forward and backward.

    lease.offload(0, a)     the `out` stream copies a, after the ops that compute it
    lease.free(0); del a    the compute stream waits for the copy; the next use of a's bytes follows it
    a = empty(...)          from the compute stream's pool
    lease.reload(0, a)      the `back` stream copies, after the previous use of those bytes
    lease.wait(0)           the compute stream waits for the copy

There is one stream per direction for the life of the process. No tensor is used on a stream while it could be freed on
another, so nothing is recorded with the allocator: the graph references what is copied out until `free`, and what is
copied back from before `reload` until `wait`. So does the lease, in case the graph is left in the middle.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..tensors.layout import has_layout, view_bytes_as
from .async_copy import TimedCopy
from .io_threads import CopyFunction, read, write
from .mapped_storage import BufferSlice
from .pinned_pool import PINNED_POOL, PinnedBlock, PinnedPool
from .spill_file import PAGE, whole_pages

ALIGNMENT = (
    256  # bytes; a slot begins at a multiple, which wastes less than 1 % on the smallest value that is offloaded
)
EventCopy = tuple[Any, Tensor]  # the event at the end of a copy, and the tensor on the device


class PinnedTier:
    """Pinned memory for the activations of a step; `slots` are their bytes.

    `cuda` is torch.cuda, or a stand-in with its streams and events; `cap` bounds what the process may have pinned in
    all when this tier asks for more.
    """

    staging = 0  # copies go straight between the device and the block

    def __init__(
        self, slots: Sequence[int], device: torch.device, cuda: Any = torch.cuda, pool: PinnedPool = PINNED_POOL,
        cap: int | None = None,
    ) -> None:  # fmt: skip
        self.slots, self.device, self.cuda, self.pool, self.cap = tuple(slots), device, cuda, pool, cap
        *self.offsets, nbytes = accumulate((-(-slot // ALIGNMENT) * ALIGNMENT for slot in slots), initial=0)
        self.nbytes = max(nbytes, PAGE)
        self.bound: Mapping[int, BufferSlice] = {}
        self.closed = True
        pool.reserve(self.nbytes, device, cap)
        self.closed = False

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        """Let slots be slices of offloaded state: these can be reloaded at any time, and an offload is kept."""
        self.bound = bound

    def lease(self) -> PinnedLease:
        """Acquire a block for one run of the step.

        Raises:
            PinnedError: several are leased, and one more block would exceed the cap.
        """
        block = self.pool.acquire(self.nbytes, self.device, self.cap)
        for event in block.events:  # copies follow the compute stream, and that the previous user of the block
            self.cuda.current_stream(self.device).wait_event(event)
        return PinnedLease(self, block)

    def close(self) -> None:
        """Give up the reservation; a running lease keeps its own block."""
        if not self.closed:
            self.closed = True
            self.pool.unreserve(self.nbytes, self.device)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # else the pages end with the process
            self.close()


class PinnedLease:
    """The block of one run of a step, and its running copies."""

    def __init__(self, tier: PinnedTier, block: PinnedBlock) -> None:
        self.tier, self.cuda, self.device = tier, tier.cuda, tier.device
        self.block: PinnedBlock | None = block
        self.written: dict[int, Any] = {}  # by slot, the event at the end of the copy out
        self.copying_out: dict[int, EventCopy] = {}
        self.copying_back: dict[int, EventCopy] = {}
        self.last: dict[Any, Any] = {}  # by stream, the event at its end
        self.views: dict[int, Tensor] = {}  # by slot, the latest view of its bytes
        self.copies: dict[CopyFunction, list[TimedCopy]] = {write: [], read: []}  # of a run that is timed
        self.since: Any = None  # the event from which times of copies count
        self.bound = tier.bound  # of this run: a later one may find the state elsewhere

    def time_copies(self) -> None:
        """Record the times of copies. Not yet run on a GPU."""
        self.since = self.cuda.Event(enable_timing=True)
        self.since.record(self.cuda.current_stream(self.device))

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        """Let slots be elsewhere than the tier was told."""
        self.bound = {**self.bound, **bound}
        self.views.clear()

    def offload(self, slot: int, tensor: Tensor) -> None:
        out, _ = copy_streams(self.cuda, self.device)
        self.written[slot] = self._copy(write, out, self._host_view(slot, tensor), tensor)
        self.copying_out[slot] = self.written[slot], tensor

    def free(self, slot: int) -> None:
        event, _ = self.copying_out.pop(slot)
        self.cuda.current_stream(self.device).wait_event(event)

    def reload(self, slot: int, tensor: Tensor) -> None:
        _, back = copy_streams(self.cuda, self.device)
        if slot in self.written or slot not in self.bound:
            back.wait_event(self.written[slot])
        self.copying_back[slot] = self._copy(read, back, tensor, self._host_view(slot, tensor)), tensor

    def wait(self, slot: int) -> None:
        event, _ = self.copying_back.pop(slot)
        self.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        """Order the compute stream behind all running copies, and later copies behind it.

        A CUDA graph has to end like this, because its events mean nothing outside of it.
        """
        used, self.last = self.last, {}
        done = self.cuda.Event()  # never recorded, so that no wait for it blocks
        self.written = dict.fromkeys(self.written, done)
        self.copying_out = {slot: (done, tensor) for slot, (_, tensor) in self.copying_out.items()}
        self.copying_back = {slot: (done, tensor) for slot, (_, tensor) in self.copying_back.items()}
        for stream in used:
            self.cuda.current_stream(self.device).wait_stream(stream)

    def release(self) -> None:
        """Return the block. The host waits only for copies that a failed step has left running."""
        block, self.block = self.block, None
        if block is not None:
            for event, _ in (*self.copying_out.values(), *self.copying_back.values()):
                event.synchronize()
            self.copying_out.clear()
            self.copying_back.clear()
            self.views.clear()
            block.events = tuple(self.last.values())
            self.tier.pool.release(block)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()

    def _host_view(self, slot: int, tensor: Tensor) -> Tensor:
        """The bytes of a slot, with the tensor's type, shape and strides."""
        if self.block is None:
            raise ValueError("this lease is released")
        view = self.views.get(slot)
        if view is not None and has_layout(view, tensor):  # that of the offload serves the reload
            return view
        if bound := self.bound.get(slot):
            view = bound.view_like(tensor)
        else:
            begin = self.tier.offsets[slot]
            view = view_bytes_as(self.block.bytes[begin : begin + self.tier.slots[slot]], tensor)
        self.views[slot] = view
        return view

    def _copy(self, move: CopyFunction, stream: Any, into: Tensor, of: Tensor) -> Any:
        if self.since is None:
            event = copy_on_stream(self.cuda, self.device, stream, into, of)
        else:
            stream.wait_stream(self.cuda.current_stream(self.device))
            begin = self.cuda.Event(enable_timing=True)
            begin.record(stream)
            event = record_event(self.cuda, stream, into, of, timed=True)
            copied = EventTimes(self.since, begin, event, of.nbytes)
            self.copies[move].append(copied)  # pyright: ignore[reportArgumentType] # a cached_property reads the same
        self.last[stream] = event
        return event


@dataclass(frozen=True, eq=False)
class EventTimes:
    """A copy between two events. Its times, in seconds after the event `since`, are known when it has ended."""

    since: Any
    begin: Any
    end: Any
    nbytes: int

    @cached_property
    def started(self) -> float:
        """When the copy began."""
        self.end.synchronize()
        return float(self.since.elapsed_time(self.begin)) / 1e3

    @cached_property
    def ended(self) -> float:
        """When it ended."""
        self.end.synchronize()
        return float(self.since.elapsed_time(self.end)) / 1e3


def copy_on_stream(cuda: Any, device: torch.device, stream: Any, into: Tensor, of: Tensor) -> Any:
    """Copy on a stream after all work of the current one, and return the event at its end."""
    stream.wait_stream(cuda.current_stream(device))
    return record_event(cuda, stream, into, of)


def record_event(cuda: Any, stream: Any, into: Tensor, of: Tensor, timed: bool = False) -> Any:
    """Copy on a stream, and return the event at its end."""
    with cuda.stream(stream):
        into.copy_(of, non_blocking=True)
        event = cuda.Event(enable_timing=timed)
        event.record(stream)
    return event


@functools.cache
def copy_streams(cuda: Any, device: torch.device) -> tuple[Any, Any]:
    """The streams of copies out and back, the same for the life of the process."""
    return cuda.Stream(device), cuda.Stream(device)


@functools.cache
def extra_streams(cuda: Any, device: torch.device) -> tuple[Any, Any]:
    """Two more, for copies that need not follow those."""
    return cuda.Stream(device), cuda.Stream(device)


@functools.cache
def pinned_speed(device: torch.device, nbytes: int = 64 << 20, line: int = 1) -> tuple[float, float]:
    """Measure bytes per microsecond out to pinned memory and back, over `line` copies in a row.

    The memory is a block like those of a step: what torch pins may be copied at another speed.
    """
    block = PinnedBlock(whole_pages(nbytes), device, PINNED_POOL.allocator)
    try:
        on_host = block.bytes[:nbytes]
        on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
        stream = torch.cuda.current_stream(device)  # of the device, which need not be the current one
        return nbytes / _copy_us(stream, on_host, on_device, line), nbytes / _copy_us(stream, on_device, on_host, line)
    finally:
        block.close()


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
