"""The far tier that a device has: disk behind a CPU, pinned host memory behind a GPU.

linked(machine, "disk", device, folder, sizes) -> the machine with bytes per microsecond out and back, and what copies
                                                  take of compute, measured
far_tier(device, slots, folder) -> what a step offloads to
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike

import torch

from passes import Machine

from .disk import DiskTier
from .flight import Tier
from .homes import Where
from .host import Host
from .links import casts, disk_links, host_links
from .pinned import PinnedTier
from .slab import cap_nbytes
from .spill import spill_folder
from .toll import disk_toll
from .workers import STAGING

Folder = str | PathLike[str] | None
USUAL = 4 << 20  # bytes of a value, where nothing is known of those that may be sent


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


def linked(
    machine: Machine, tier: str | None, device: torch.device, folder: Folder, sizes: Sequence[int] = (USUAL,),
    wire: str = "", pinned: int | None = None, room: int | None = None,
) -> Machine:  # fmt: skip
    """The machine with its links to the tier, measured at first use.

    A link has one rate, and small copies are slower.  It is the rate at which copies of all of `sizes`, the values that
    may be sent, take as long as they were measured to: right for the sum of them, too high for the smallest of them and
    too low for the largest.  With `wire`, values may be cast to it for their way; `pinned` is what the caller allows of
    the host's memory, and `room` are the bytes of the device that measuring a disk may take.
    """
    if tier is None:
        return machine
    sizes = sizes or (USUAL,)
    room = room // 2 if room is not None else None  # what Python has made of the step lies there as well
    links = host_links(device) if tier == "host" else disk_links(folder, room)
    out, back = links
    machine = replace(machine, tier=tier, out=out.rate(sizes), back=back.rate(sizes))
    if wire:
        out, back = casts(device)
        machine = replace(machine, wire=wire, narrow=out.rate(sizes), widen=back.rate(sizes))
    if tier == "host":  # less what the slots lose by where they begin
        cap = cap_nbytes() if pinned is None else pinned
        return replace(machine, capacity=cap - cap // 128)
    toll, capacity = disk_toll(folder, links, room), shutil.disk_usage(spill_folder(folder)).free
    return replace(machine, staging=STAGING, call=toll.call, drag=toll.drag, capacity=capacity, turns=True)


def ground(device: torch.device, folder: Folder, pinned: int | None = None) -> Where:
    """Where the state of what lies on the device may live."""
    return Host(device, cap=pinned) if device.type == "cuda" else folder


def far_tier(device: torch.device, slots: Sequence[int], folder: Folder, pinned: int | None = None) -> Tier | None:
    """Room for the slots of one step in flight, and more when more are; None if there are no slots."""
    if not slots:
        return None
    return DiskTier(slots, folder) if device.type == "cpu" else PinnedTier(slots, device, cap=pinned)
