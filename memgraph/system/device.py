"""What the machine has: the memory of a device, and how a process is made to show its real peak.

    memory_nbytes(cpu), unused_nbytes(cpu)    ->   67 GB, of which 41 GB can be had now
    return_freed_memory()                     ->   freed tensors go back to the system at once

On a CPU the device is RAM: the machine's, or what a control group leaves of it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's parameters, from <malloc.h>
RETURNED = 128 * 1024  # from this size on, freed memory goes back to the system at once
KEPT = 32 << 20  # the same while ops are priced: glibc takes no more, and comes to this by itself in eager
CPU = torch.device("cpu")
HEADROOM = 1 << 30  # bytes of a GPU
CUDA_BLOCK = 512  # bytes; what the caching allocator rounds up to

_returns = False


def memory_nbytes(device: torch.device) -> int:
    """All bytes of the device's memory.

    Raises:
        ValueError: it is no CPU and no CUDA device.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        raise ValueError(
            f"the model lies on {device}, which has no memory to plan for; move it to a CPU or a CUDA device"
        )
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_control_group()])


def unused_nbytes(device: torch.device) -> int:
    """The bytes of the device's memory that can be had now; of a GPU's, also those that torch keeps for later use, and
    no more than the process may take."""
    if device.type == "cuda":
        given = torch.cuda.memory_allocated(device)
        kept = torch.cuda.memory_reserved(device) - given
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * memory_nbytes(device))
        return max(0, min(int(torch.cuda.mem_get_info(device)[0]) + kept, allowed - given))
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # too many open files, say
        return min(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_nbytes(device))
    for line in lines:
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, memory_nbytes(device))
    return memory_nbytes(device)


def headroom_nbytes(device: torch.device) -> int:
    """The bytes that a budget of all unused memory leaves free.  Not yet run on a GPU.

    On a GPU kernels that are loaded later, collectives and what lies between the allocator's blocks want some.
    """
    if device.type != "cuda":
        return 0
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:true" in settings.replace(" ", "").lower():  # next to nothing lies between blocks
        return HEADROOM
    return max(HEADROOM, memory_nbytes(device) * 3 // 100)


def release_cached(device: torch.device) -> None:
    """Give back what torch keeps of a GPU's memory for later use, so that blocks of other sizes can be had."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def releasing_cached(device: torch.device) -> Iterator[None]:
    """Afterwards give back blocks that no step asks for, as are left where ops were priced one at a time."""
    try:
        yield
    finally:
        release_cached(device)


def block_nbytes(nbytes: int, device: torch.device) -> int:
    """The bytes that the device's allocator takes for a storage of `nbytes`: a GPU's are blocks of 512."""
    return -(-nbytes // CUDA_BLOCK) * CUDA_BLOCK if device.type == "cuda" else nbytes


def hold_to(nbytes: int, device: torch.device) -> None:
    """Let this process's allocator take no more than `nbytes` of a GPU.  Not yet run on a GPU.

    Raises:
        ValueError: the device is no GPU; nothing there can be told to.
    """
    if device.type != "cuda":
        raise ValueError(
            f"strict=True has the allocator of a GPU refuse what is over the budget, and the model lies on {device}; "
            "on a CPU the operating system can do that: resource.setrlimit(resource.RLIMIT_DATA, ...)"
        )
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / memory_nbytes(device)), device)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The one device on which all of `tensors` lie; the CPU, if there are none.

    Raises:
        ValueError: they lie on several.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(
            f"the model lies on several devices, {sorted(map(str, devices))}; move it to one with model.to(...)"
        )
    return devices.pop() if devices else torch.device("cpu")


def return_freed_memory() -> None:
    """Make glibc hand freed tensors back to the system, so that the process's memory follows the bytes that live.

    It stays so until the process ends, and makes every op slower that allocates: see `returns_freed_memory`.
    """
    global _returns
    _returns = _return_from(RETURNED) or _returns


def returns_freed_memory() -> bool:
    """Whether `return_freed_memory` was called in this process: what ops took before does not hold any more."""
    return _returns


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Let freed blocks of less than KEPT stay, if they would go back: what is timed meanwhile is what eager takes, and
    does not depend on what gaps there are between others."""
    if not _returns:
        yield
        return
    _return_from(KEPT)
    try:
        yield
    finally:
        _return_from(RETURNED)
        trim_freed_memory()  # what was kept lies below blocks that stay, perhaps


def trim_freed_memory() -> None:
    """Give all pages of freed memory back to the system, those in gaps as well."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _return_from(nbytes: int) -> bool:
    """Have freed blocks of so many bytes go back; whether there is a way to."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt(MMAP_THRESHOLD, nbytes)
    mallopt(TRIM_THRESHOLD, 2 * nbytes if nbytes == KEPT else nbytes)
    return True


def _control_group() -> list[int]:
    found = []
    for path in CGROUP:
        with suppress(OSError):  # where the system does not tell, there is no limit
            found.append(path.read_text().strip())
    return [int(text) for text in found if text.isdigit()]
