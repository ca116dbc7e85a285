"""Let activations lie in pinned host memory between forward and backward.  Not yet run on a GPU.

    lease.offload(0, a)     the `out` stream copies a, behind what computes it
    lease.free(0); del a    the compute stream waits for the copy; whatever takes a's bytes next comes behind it
    a = empty(...)          from the compute stream's pool
    lease.reload(0, a)      the `back` stream copies, behind whatever had those bytes
    lease.wait(0)           the compute stream waits for the copy

One stream per direction for the life of the process.  No tensor is used on a stream while it could be freed on another,
so nothing is recorded with the allocator.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .homes import Place

PAGE = 4096


class PinnedTier:
    """Room in pinned memory for the activations of a step; `slots` are their bytes."""

    staging = 0  # copies go straight between the device and the slab

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        self.slots = tuple(slots)
        self.device = device
        *self.offsets, self.nbytes = accumulate((-(-slot // PAGE) * PAGE for slot in slots), initial=0)
        self.slabs = [self._slab()]

    def bind(self, homes: Mapping[int, Place]) -> None:
        """Nothing of the state lives in pinned memory yet: plans for a GPU stream nothing."""
        assert not homes

    def lease(self) -> PinnedLease:
        """Room for one step in flight; another slab is made if all are out."""
        return PinnedLease(self, self.slabs.pop() if self.slabs else self._slab())

    def close(self) -> None:
        """Give the slabs back to the host."""
        self.slabs.clear()

    def _slab(self) -> Tensor:
        return torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)


class PinnedLease:
    """One step's room: a slab, and an event for each copy that has begun."""

    def __init__(self, tier: PinnedTier, slab: Tensor) -> None:
        self.tier = tier
        self.slab: Tensor | None = slab
        self.gone: dict[int, torch.cuda.Event] = {}
        self.come: dict[int, torch.cuda.Event] = {}

    def bind(self, homes: Mapping[int, Place]) -> None:
        self.tier.bind(homes)

    def offload(self, slot: int, tensor: Tensor) -> None:
        out, _ = streams(self.tier.device)
        self.gone[slot] = self._copy(out, self._part(slot, tensor), tensor)

    def free(self, slot: int) -> None:
        torch.cuda.current_stream(self.tier.device).wait_event(self.gone[slot])

    def reload(self, slot: int, tensor: Tensor) -> None:
        _, back = streams(self.tier.device)
        back.wait_event(self.gone[slot])
        self.come[slot] = self._copy(back, tensor, self._part(slot, tensor))

    def wait(self, slot: int) -> None:
        torch.cuda.current_stream(self.tier.device).wait_event(self.come[slot])

    def speeds(self) -> tuple[float, float]:
        """Nothing is known of how fast the copies were: their events keep no times."""
        return 0.0, 0.0

    def release(self) -> None:
        """Let running copies end, then give the slab back."""
        slab, self.slab = self.slab, None
        if slab is not None:
            for event in (*self.gone.values(), *self.come.values()):
                event.synchronize()
            self.tier.slabs.append(slab)

    def __del__(self) -> None:
        self.release()

    def _part(self, slot: int, tensor: Tensor) -> Tensor:
        """The place of a slot in the slab, with the tensor's type, shape and strides."""
        assert self.slab is not None
        begin = self.tier.offsets[slot]
        flat = self.slab[begin : begin + self.tier.slots[slot]].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def _copy(self, stream: torch.cuda.Stream, into: Tensor, of: Tensor) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self.tier.device))
        with torch.cuda.stream(stream):
            into.copy_(of, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event


@functools.cache
def streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of copies out and back, the same for the life of the process."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@functools.cache
def pinned_speed(device: torch.device, nbytes: int = 64 << 20) -> tuple[float, float]:
    """Bytes per microsecond out to pinned memory and back, measured."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return nbytes / _copy_us(host, there), nbytes / _copy_us(there, host)


def _copy_us(into: Tensor, of: Tensor) -> float:
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        into.copy_(of, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return min(times)
