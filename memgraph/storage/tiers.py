"""The far tier that a device has: disk behind a CPU, pinned host memory behind a GPU.

linked(machine, "disk", device, folder, sizes) -> the machine with bytes per microsecond out and back, and what copies
                                                  take of compute, measured
far_tier(device, slots, folder) -> what a step offloads to
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .async_copy import CopyLog
from .disk_tier import DiskTier
from .mapped_storage import BufferLocation, BufferSlice
from .pinned_storage import PinnedBufferAllocator
from .pinned_tier import PinnedTier
from .spill_file import Folder


class Tier(Protocol):
    """Where offloaded values lie."""

    staging: int  # bytes of the device that copies take

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        """Let slots be where tensors of the state live, in all flights from now on."""

    def lease(self) -> Lease:
        """Room for one step in flight."""
        ...

    def close(self) -> None:
        """Give the bytes back, those of a lease that is out when it is released."""


class Lease(Protocol):
    """Room in the far tier for one step in flight, and what has moved there; nothing, if nobody notes its times."""

    copies: CopyLog

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        """Let slots be where tensors of the state live, in this flight alone."""

    def offload(self, slot: int, tensor: Tensor) -> None:
        """Begin to copy a tensor out; its bytes must not change until `free`."""

    def free(self, slot: int) -> None:
        """What comes now comes behind that copy, so that the tensor's bytes may go."""

    def reload(self, slot: int, tensor: Tensor) -> None:
        """Begin to fill a tensor with what lies in the slot."""

    def wait(self, slot: int) -> None:
        """What comes now comes behind that copy, so that the tensor may be read."""

    def release(self) -> None:
        """Let what has begun end, and give the room back."""


def tier_name(offload: str | None, device: torch.device) -> str | None:
    """The tier that `offload` means on `device`.

    Raises:
        ValueError: there is no such tier for this device.
    """
    behind = {"cpu": "disk", "cuda": "host"}.get(device.type)
    if offload == "auto":
        return behind
    if offload is not None and offload != behind:
        raise ValueError(
            f"offload={offload!r}, but values on {device} can go to {behind!r} only; give 'auto', {behind!r} or None"
        )
    return offload


def buffer_location(device: torch.device, folder: Folder, pinned: int | None = None) -> BufferLocation:
    """Where the state of what lies on the device may live."""
    return PinnedBufferAllocator(device, cap=pinned) if device.type == "cuda" else folder


def open_tier(device: torch.device, slots: Sequence[int], folder: Folder, pinned: int | None = None) -> Tier | None:
    """Room for the slots of one step in flight, and more when more are; None if there are no slots."""
    if not slots:
        return None
    return DiskTier(slots, folder) if device.type == "cpu" else PinnedTier(slots, device, cap=pinned)
