"""Choose the tier of a device: disk behind a CPU, pinned host memory behind a GPU.

tier_name("auto", cpu)          ->  "disk"
open_tier(cpu, slots, folder)   ->  a DiskTier with a file for each run of the step
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
    """Where the offloaded values of a step are."""

    staging: int  # bytes of the device that copies take

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        """Let slots be slices of offloaded state in all runs from now on."""

    def lease(self) -> Lease:
        """Return the slots of one run of the step."""
        ...

    def close(self) -> None:
        """Free the bytes, those of a running lease when it is released."""


class Lease(Protocol):
    """The slots of one run of a step, and a log of its copies."""

    @property
    def copies(self) -> CopyLog:
        """The copies that were begun; empty where no times are recorded."""
        ...

    def time_copies(self) -> None:
        """Record the times of the copies of this run, where that is not done anyway."""

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        """Let slots be slices of offloaded state in this run only."""

    def offload(self, slot: int, tensor: Tensor) -> None:
        """Begin to copy a tensor out; its bytes must not change until `free`."""

    def free(self, slot: int) -> None:
        """Order everything that follows behind that copy, so that the tensor may be freed."""

    def reload(self, slot: int, tensor: Tensor) -> None:
        """Begin to fill a tensor with the bytes of the slot."""

    def wait(self, slot: int) -> None:
        """Order everything that follows behind that copy, so that the tensor may be read."""

    def release(self) -> None:
        """Let running copies end, and return the slots."""


def tier_name(offload: str | None, device: torch.device) -> str | None:
    """Return the tier that `offload` means on `device`.

    Raises:
        ValueError: there is no such tier for this device.
    """
    tier = {"cpu": "disk", "cuda": "host"}.get(device.type)
    if offload == "auto":
        return tier
    if offload is not None and offload != tier:
        raise ValueError(
            f"offload={offload!r}, but values on {device} can go to {tier!r} only; give 'auto', {tier!r} or None"
        )
    return offload


def buffer_location(device: torch.device, folder: Folder, pinned: int | None = None) -> BufferLocation:
    """Return where state of this device is offloaded to."""
    return PinnedBufferAllocator(device, cap=pinned) if device.type == "cuda" else folder


def open_tier(device: torch.device, slots: Sequence[int], folder: Folder, pinned: int | None = None) -> Tier | None:
    """Open a tier with these slots for each run of a step; None if there are none."""
    if not slots:
        return None
    return DiskTier(slots, folder) if device.type == "cpu" else PinnedTier(slots, device, cap=pinned)
