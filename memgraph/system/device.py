"""Memory of a device, and of this process.

    memory_nbytes(cpu), unused_nbytes(cpu)    ->   67 GB in all, 41 GB free
    return_freed_memory()                     ->   freed blocks go back to the system at once

The memory of a CPU is the machine's RAM, or the limit of the process's control group.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's parameters, from <malloc.h>
RETURNED = 128 * 1024  # from this size on, freed memory goes back to the system at once
CPU = torch.device("cpu")
HEADROOM = 1 << 30  # bytes of a GPU
CUDA_BLOCK = 512  # bytes; the caching allocator rounds up to a multiple


def memory_nbytes(device: torch.device) -> int:
    """Return the bytes of the device's memory.

    Raises:
        ValueError: the device is no CPU and no CUDA device.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        raise ValueError(
            f"the model is on {device}, which has no memory to plan for; "
            + (_of_meta([device]) or "move it to a CPU or a CUDA device")
        )
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_control_group()])


def unused_nbytes(device: torch.device) -> int:
    """Return the bytes of the device's memory that this process can allocate now.

    On a GPU this includes the blocks that torch's allocator caches, up to the limit set for the process.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - allocated
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * memory_nbytes(device))
        return max(0, min(int(torch.cuda.mem_get_info(device)[0]) + cached, allowed - allocated))
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # too many open files, say
        return min(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_nbytes(device))
    for line in lines:
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, memory_nbytes(device))
    return memory_nbytes(device)


def headroom_nbytes(device: torch.device) -> int:
    """Return the bytes that a budget of all unused memory leaves free.

    A GPU needs them for kernels that are loaded later, collectives, and gaps between the allocator's blocks.
    """
    if device.type != "cuda":
        return 0
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:true" in settings.replace(" ", "").lower():  # almost no gaps between blocks
        return HEADROOM
    return max(HEADROOM, memory_nbytes(device) * 3 // 100)


def release_cached(device: torch.device) -> None:
    """Free the blocks that torch's allocator caches on a GPU, so that blocks of other sizes fit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def block_nbytes(nbytes: int, device: torch.device) -> int:
    """Return the bytes that the device's allocator uses for a storage; a GPU's blocks are multiples of 512."""
    return -(-nbytes // CUDA_BLOCK) * CUDA_BLOCK if device.type == "cuda" else nbytes


def hold_to(nbytes: int, device: torch.device) -> None:
    """Limit this process's allocator to `nbytes` of a GPU.

    Raises:
        ValueError: the device is no GPU.
    """
    if device.type != "cuda":
        raise ValueError(
            f"strict=True has the allocator of a GPU refuse what is over the budget, and the model is on {device}; "
            "on a CPU the operating system can do that: resource.setrlimit(resource.RLIMIT_DATA, ...)"
        )
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / memory_nbytes(device)), device)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of all `tensors`, or the CPU if there are no tensors.

    Raises:
        ValueError: they are on several devices.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(
            f"the model is on several devices, {sorted(map(str, devices))}; move it to one with model.to(...)"
            + (f"; {advice}" if (advice := _of_meta(devices)) else "")
        )
    return devices.pop() if devices else torch.device("cpu")


def _of_meta(devices: Iterable[torch.device]) -> str:
    """Return advice for parameters that have no values."""
    if all(device.type != "meta" for device in devices):
        return ""
    return (
        "make it on a CPU or a CUDA device, or give it memory there with to_empty(device=...) and load its values "
        "(memgraph fit plans one without values); if hooks around its parts load their parameters in each call, as "
        "accelerate's cpu_offload, disk_offload and dispatch_model do, remove them "
        "(accelerate.hooks.remove_hook_from_submodules), since no captured step runs them: a plan offloads parameters "
        "itself"
    )


def return_freed_memory() -> None:
    """Make glibc return freed blocks to the system, so that the process's memory follows the live bytes.

    This lasts until the process ends, and slows down every op that allocates.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, RETURNED)
        mallopt(TRIM_THRESHOLD, RETURNED)


def trim_freed_memory() -> None:
    """Return all pages of freed memory to the system, also those between live blocks."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _control_group() -> list[int]:
    limits = []
    for path in CGROUP:
        with suppress(OSError):  # a missing file means no limit
            limits.append(path.read_text().strip())
    return [int(text) for text in limits if text.isdigit()]
