"""Choose the tiers of a device: a disk behind a CPU, with or without host memory before it; pinned memory behind a GPU.

tier_names("auto", cpu, host=None)            ->  ("disk",)
tier_names("auto", cpu, host=8 << 30)         ->  ("host", "disk")
open_tier(cpu, slots, ["", "disk"], places)   ->  files for each run of the step: slot 0 in memory, slot 1 on the disk
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .async_copy import CopyLog
from .file_space import UNCAPPED, FileSpace
from .file_tier import FileLease, FileTier
from .mapped_storage import BufferAllocator, BufferSlice
from .pinned_storage import PinnedBufferAllocator
from .pinned_tier import PinnedTier
from .places import Places
from .spill_file import Folder, spill_folder


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


def tier_names(
    offload: str | None, device: torch.device, host: int | None = None, disk: int | None = None
) -> tuple[str, ...]:
    """Return the tiers that `offload` means on `device`, the nearest first, with so many bytes, if those are given.

    Raises:
        ValueError: there is no such tier for this device, or bytes are given for one that `offload` leaves out.
    """
    known: Mapping[str, tuple[str, ...]] = {"cpu": ("disk",) if host is None else ("host", "disk"), "cuda": ("host",)}
    tiers = known.get(device.type, ())
    names = tiers if offload == "auto" else () if offload is None else (offload,)
    for name, nbytes in (("host", host), ("disk", disk)):
        if nbytes is not None and name not in names and (name in tiers or offload == "auto"):
            raise ValueError(
                f"{name}= gives bytes of a tier, and offload={offload!r} offloads nothing there from {device}: leave "
                f"out {name}="
            )
    if offload == "auto" or offload is None:
        return names
    if offload not in tiers:
        missing = "; on a CPU host= says how much of its memory is for what is offloaded" * (device.type == "cpu")
        words = ", ".join(map(repr, ("auto", *tiers)))
        raise ValueError(
            f"offload={offload!r}, but values on {device} can go to {' and '.join(map(repr, tiers)) or 'no tier'} "
            f"only; give {words} or None{missing}"
        )
    return (offload,)


def open_places(
    tiers: Sequence[str], device: torch.device, folder: Folder, host: int | None = None, disk: int | None = None
) -> Places:
    """Return where each of the tiers keeps its bytes, at most so many on the host and on the disk."""
    if device.type == "cuda":
        return Places({"host": PinnedBufferAllocator(device, cap=host)})
    if "host" not in tiers:
        return Places({"disk": folder if disk is None else FileSpace(spill_folder(folder), disk)})
    behind = FileSpace(spill_folder(folder), UNCAPPED if disk is None else disk) if "disk" in tiers else None
    memory = FileSpace(None, UNCAPPED if host is None else host, behind)
    return Places({"host": memory} if behind is None else {"host": memory, "disk": behind})


def open_tier(device: torch.device, slots: Sequence[int], tiers: Sequence[str], places: Places) -> Tier | None:
    """Open a tier with these slots for each run of a step, each in the tier of its name; None if there are none."""
    if not slots:
        return None
    if device.type != "cpu":
        location = places.at("")
        return PinnedTier(slots, device, cap=location.cap if isinstance(location, PinnedBufferAllocator) else None)
    opened = {}
    # Slots that hold offloaded state take no bytes, and any tier copies them.
    for name in dict.fromkeys(tier for nbytes, tier in zip(slots, tiers, strict=True) if nbytes) or tiers[-1:]:
        space = places.at(name)
        assert not isinstance(space, BufferAllocator)
        own = (nbytes if tier == name else 0 for nbytes, tier in zip(slots, tiers, strict=True))
        opened[name] = FileTier(tuple(own), space)
    return JoinedTiers(opened, tiers) if len(opened) > 1 else next(iter(opened.values()))


class JoinedTiers:
    """Several tiers as one: each slot is in one of them."""

    def __init__(self, tiers: Mapping[str, FileTier], places: Sequence[str]) -> None:
        """Args: places: the name of the tier of each slot."""
        self.tiers, self.places = tiers, tuple(places)
        self.staging = max(tier.staging for tier in tiers.values())

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        for tier in self.tiers.values():
            tier.bind(bound)

    def lease(self) -> JoinedLease:
        return JoinedLease({name: tier.lease() for name, tier in self.tiers.items()}, self.places)

    def close(self) -> None:
        for tier in self.tiers.values():
            tier.close()


class JoinedLease:
    """The leases of several tiers as one."""

    def __init__(self, leases: Mapping[str, FileLease], places: Sequence[str]) -> None:
        self.leases = leases
        some = next(iter(leases.values()))
        self.of = tuple(leases.get(name, some) for name in places)  # by slot

    @property
    def copies(self) -> CopyLog:
        logs = [lease.copies for lease in self.leases.values()]
        return {move: [copy for log in logs for copy in log.get(move, ())] for log in logs for move in log}

    def time_copies(self) -> None:
        """Do nothing: the threads record times of all copies."""

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        for lease in self.leases.values():
            lease.bind(bound)

    def offload(self, slot: int, tensor: Tensor) -> None:
        self.of[slot].offload(slot, tensor)

    def free(self, slot: int) -> None:
        self.of[slot].free(slot)

    def reload(self, slot: int, tensor: Tensor) -> None:
        self.of[slot].reload(slot, tensor)

    def wait(self, slot: int) -> None:
        self.of[slot].wait(slot)

    def release(self) -> None:
        for lease in self.leases.values():
            lease.release()
