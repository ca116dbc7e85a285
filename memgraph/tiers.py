"""The far tier that a device has: disk behind a CPU, pinned host memory behind a GPU.

links("disk", device, folder) -> bytes per microsecond out and back, measured
far_tier("disk", device, slots, folder) -> what a step offloads to
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike

import torch

from passes import Machine

from .disk import STAGING, DiskTier, disk_speed
from .flight import Tier
from .pinned import PinnedTier, pinned_speed
from .spill import spill_folder

Folder = str | PathLike[str] | None


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


def linked(machine: Machine, tier: str | None, device: torch.device, folder: Folder) -> Machine:
    """The machine with its links to the tier, measured at first use."""
    if tier is None:
        return machine
    if tier == "host":
        out, back = pinned_speed(device)
        return replace(machine, tier=tier, out=out, back=back)
    out, back = disk_speed(folder)
    room = shutil.disk_usage(spill_folder(folder)).free
    return replace(machine, tier=tier, out=out, back=back, staging=STAGING, capacity=room)


def far_tier(device: torch.device, slots: Sequence[int], folder: Folder) -> Tier | None:
    """Room for the slots of one step in flight, and more when more are; None if there are no slots."""
    if not slots:
        return None
    return DiskTier(slots, folder) if device.type == "cpu" else PinnedTier(slots, device)
