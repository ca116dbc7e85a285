"""Measure the links between a device and its tier.

measure_links(machine, "disk", device, folder, sizes) -> the machine with bytes per microsecond out and back
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
from ..system import reference_op
from .copy_overhead import measure_copy_overhead
from .link_bandwidth import measure_casts, measure_disk, measure_host

USUAL_SIZES = 4 << 20  # bytes of a value, if the sizes to offload are not given


def measure_links(
    machine: Machine, tier: str | None, device: torch.device, folder: Folder, sizes: Sequence[int] = (USUAL_SIZES,),
    wire: str = "", pinned: int | None = None, room: int | None = None,
) -> Machine:  # fmt: skip
    """Return the machine with its links to the tier, measured at first use.

    A link has one rate, although small copies are slower. It is right for the sum of `sizes`, too high for the smallest
    and too low for the largest.

    Args:
        sizes: bytes of the values that may be offloaded.
        wire: dtype to which values may be cast for the copy; empty for none.
        pinned: bytes of host memory that may be pinned; None for the default.
        room: bytes of device memory that measuring may use.
    """
    if device.type == "cpu":
        reference_op.least_us()  # beside the prices, for a later step that is off its forecast
    if tier is None:
        return machine
    sizes = sizes or (USUAL_SIZES,)
    if room is not None and tier != "host":
        room //= 2  # the other half is for Python's objects of the step
    links = measure_host(device, room) if tier == "host" else measure_disk(folder, room)
    out, back = links
    link = replace(machine.link, out=out.rate(sizes), back=back.rate(sizes))
    machine = replace(machine, tier=tier)
    if wire:
        out, back = measure_casts(device, room)
        machine = replace(machine, cast=Cast(wire, out.rate(sizes), back.rate(sizes)))
    if tier == "host":  # less the padding between slots
        cap = cap_nbytes() if pinned is None else pinned
        return replace(machine, link=replace(link, capacity=cap - cap // 128))
    overhead = measure_copy_overhead(folder, links, room)
    link = replace(link, call_us=overhead.us_per_copy, us_per_byte=overhead.us_per_byte)
    capacity = shutil.disk_usage(spill_folder(folder)).free
    return replace(machine, link=replace(link, staging=STAGING, half_duplex=True, capacity=capacity))
