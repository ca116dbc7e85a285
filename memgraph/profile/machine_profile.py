"""Measure the links between a device and its tier.

linked(machine, "disk", device, folder, sizes) -> the machine with bytes per microsecond out and back
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

import torch

from passes import Cast, Machine

from ..storage.io_threads import STAGING
from ..storage.pinned_pool import cap_nbytes
from ..storage.spill_file import Folder, spill_folder
from .copy_overhead import measure_copy_overhead
from .link_bandwidth import measure_casts, measure_disk, measure_host

USUAL_SIZES = 4 << 20  # bytes of a value, where nothing is known of those that may be sent


def measure_links(
    machine: Machine, tier: str | None, device: torch.device, folder: Folder, sizes: Sequence[int] = (USUAL_SIZES,),
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
    sizes = sizes or (USUAL_SIZES,)
    room = room // 2 if room is not None else None  # what Python has made of the step lies there as well
    links = measure_host(device) if tier == "host" else measure_disk(folder, room)
    out, back = links
    link = replace(machine.link, out=out.rate(sizes), back=back.rate(sizes))
    machine = replace(machine, tier=tier)
    if wire:
        out, back = measure_casts(device)
        machine = replace(machine, cast=Cast(wire, out.rate(sizes), back.rate(sizes)))
    if tier == "host":  # less what the slots lose by where they begin
        cap = cap_nbytes() if pinned is None else pinned
        return replace(machine, link=replace(link, capacity=cap - cap // 128))
    toll, capacity = measure_copy_overhead(folder, links, room), shutil.disk_usage(spill_folder(folder)).free
    link = replace(link, staging=STAGING, call_us=toll.call, us_per_byte=toll.drag, half_duplex=True)
    return replace(machine, link=replace(link, capacity=capacity))
