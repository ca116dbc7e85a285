"""The far tier that a device has: disk behind a CPU, pinned host memory behind a GPU.

linked(machine, "disk", device, folder, sizes) -> the machine with bytes per microsecond out and back, and what copies
                                                  take of compute, measured
far_tier(device, slots, folder) -> what a step offloads to
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .disk_tier import DiskTier
from .mapped_storage import BufferLocation
from .pinned_storage import PinnedBufferAllocator
from .pinned_tier import PinnedTier
from .spill_file import Folder
from .tier import Tier


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
