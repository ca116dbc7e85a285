"""The machine that all ranks of a pipeline plan for: the network between them, and their disks.

rank 0 sends 1 KB and 256 KB to rank 1, which sends them back    ->    900 bytes per microsecond after 60 microseconds
each rank copies to its disk while the others do                 ->    the rates of the slowest
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from passes import Machine, Network

from ...profile.machine_profile import measure_links
from ...storage.spill_file import Folder
from .messages import Message, receive, send, wait_for
from .stage_group import StageGroup

SIZES = (1 << 10, 1 << 18)  # bytes of a small message, and of a large one
TRIES = 4  # the fastest counts: the first one opens connections


def measure_network(group: StageGroup) -> Network:
    """Return what the first two ranks measure, on all ranks."""
    if group.ranks == 1:
        return Network()
    small, large = (_fastest_us(group, nbytes) for nbytes in SIZES)
    rate = (SIZES[1] - SIZES[0]) / max(large - small, 1.0)
    own = json.dumps([rate, small]).encode()
    return Network(*json.loads(group.share(own, "exchange of the network's speed")[0]))


def measure_disks(
    group: StageGroup, machine: Machine, tier: str | None, folder: Folder, sizes: Sequence[int], room: int
) -> Machine:
    """Return the machine with the slowest link of all ranks, which may share a disk.

    Args:
        sizes: bytes of the values that may be offloaded.
        room: bytes of memory that measuring may use.
    """
    if tier is None:
        return machine
    group.check_agreement(["the disks are measured"])  # all at once
    with group.together("measuring the disk"):
        link = measure_links(machine, tier, torch.device("cpu"), folder, sizes, room=room).link
    own = [link.out, link.back, -link.call_us, -link.us_per_byte, link.capacity // group.ranks]
    texts = group.share(json.dumps(own).encode(), "exchange of the disks' speed")
    out, back, call_us, us_per_byte, capacity = map(min, zip(*map(json.loads, texts), strict=True))
    link = replace(link, out=out, back=back, call_us=-call_us, us_per_byte=-us_per_byte, capacity=capacity)
    return replace(machine, tier=tier, link=link)


def _fastest_us(group: StageGroup, nbytes: int) -> float:
    """Return the microseconds of the fastest message there, which are half of those there and back."""
    value = torch.empty(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(TRIES if group.rank < 2 else 0):
        begin = time.perf_counter()
        there, back = Message("there", value, 0, 1), Message("back", value, 1, 0)
        if group.rank == 0:
            works = send(group, [(there, value)])
            receive(group, [back]).wait()
        else:
            works = send(group, [(back, receive(group, [there]).wait()["there"])])
        wait_for(group, works)
        times.append((time.perf_counter() - begin) * 1e6 / 2)
    return min(times, default=0.0)
