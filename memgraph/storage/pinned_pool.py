"""Pinned host memory in blocks: reserved when a step is planned, acquired by its runs, and bounded in total.

    POOL.reserve(1 << 30, cuda)            a block of at least so many bytes exists from now on
    block = POOL.acquire(1 << 30, cuda)    that one; another is made only if it is in use
    POOL.release(block)
    POOL.unreserve(1 << 30, cuda)          what no other plan needs is returned to the host

A block is whole pages of the process, registered with CUDA: exactly as many bytes as were asked for, where torch's
allocator of pinned memory rounds up to a power of two. Steps that run one after the other share a block. Where the host
does not pin, copies use pageable memory, slower and synchronous, after one warning.

Give memory its pages at once, large ones, by several threads.

Before: pinning faults 4 KiB at a time, in one thread        After: it finds all pages, most of them of 2 MiB

Pages keep their contents. A system that can't do either leaves the memory as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import MemgraphError
from ..system.byte_sizes import BudgetRequest, asked_nbytes
from ..system.device import CPU, memory_nbytes
from ..system.user_warning import warn_user
from .spill_file import whole_pages

VARIABLE = "MEMGRAPH_PINNED"
HOST = BudgetRequest("host", "the host", f"None (behind a GPU that is {VARIABLE}, or half of the host's memory)")
NAMED = BudgetRequest(VARIABLE, "the host", "None for half of that")
REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped: pinned for all devices, which can access it
MMAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # private pages, which are pinned faster than shared ones
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23  # of Linux; the second since 5.14
PART = 64 << 20  # bytes that a thread populates at a time
MOST = 16  # threads


class PinnedError(MemgraphError):
    """More pinned memory would be needed than is allowed."""


class PinnedAllocator(Protocol):
    """Pins pages."""

    def register(self, flat: Tensor, device: torch.device) -> str:
        """Pin the pages of a tensor; return why not, if that is refused."""
        ...

    def unregister(self, flat: Tensor) -> None:
        """Unpin the pages, once no device uses them any more."""
        ...


@dataclass(eq=False)
class PinnedBlock:
    """`nbytes` bytes of whole pages; `pinned` is False if the host refused to pin them."""

    nbytes: int
    device: torch.device
    allocator: PinnedAllocator
    bytes: Tensor = field(init=False)
    pinned: bool = False
    events: tuple[Any, ...] = ()  # at the end of the copies of its last user

    def __post_init__(self) -> None:
        mapping = mmap.mmap(-1, self.nbytes, flags=MMAP_FLAGS)
        # After a fork, the first write to a page would leave the device with the old one.
        mapping.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        why = self.allocator.register(self.bytes, self.device)
        self.pinned = not why
        if why:
            warn_user(
                f"{self.nbytes} bytes of host memory can't be pinned ({why}), so that copies are slow and wait for "
                f"each other; allow the process more locked memory (ulimit -l), or raise the budget"
            )

    def close(self) -> None:
        """Wait for running copies, and return the pages."""
        for event in self.events:
            event.synchronize()
        if self.pinned:
            self.pinned = False
            self.allocator.unregister(self.bytes)
        self.bytes = self.bytes[:0].clone()


class PinnedPool:
    """The blocks of the process, bounded in total by the `cap` of a caller that asks for more, else by its own."""

    def __init__(self, cap: Callable[[], int], allocator: PinnedAllocator) -> None:
        self.cap, self.allocator = cap, allocator
        self.free: list[PinnedBlock] = []
        self.in_use: list[PinnedBlock] = []
        self.reservations: list[tuple[int, torch.device]] = []
        self.claimed = 0  # bytes that are pinned for offloaded state
        self.lock = threading.RLock()  # the garbage collector may release a lease anywhere

    @property
    def nbytes(self) -> int:
        """All pinned bytes."""
        return self.claimed + sum(block.nbytes for block in (*self.free, *self.in_use))

    def claim(self, nbytes: int, cap: int | None = None) -> None:
        """Count bytes that are pinned elsewhere; a negative number gives them back.

        Raises:
            PinnedError: they would exceed the cap.
        """
        with self.lock:
            if nbytes > 0:
                self._check(nbytes, cap)
            self.claimed += nbytes

    def reserve(self, nbytes: int, device: torch.device, cap: int | None = None) -> None:
        """Make sure that a block of `nbytes` exists for a plan.

        Raises:
            PinnedError: it would exceed the cap.
        """
        with self.lock:
            block = self.acquire(nbytes, device, cap)
            self.reservations.append((_block_nbytes(nbytes), device))
            self.release(block)

    def unreserve(self, nbytes: int, device: torch.device) -> None:
        """Drop one reservation, and close blocks that are larger than all others need."""
        with self.lock:
            self.reservations.remove((_block_nbytes(nbytes), device))
            self._trim()

    def acquire(self, nbytes: int, device: torch.device, cap: int | None = None) -> PinnedBlock:
        """Return a block of at least `nbytes`, for one run of a step.

        Raises:
            PinnedError: it would exceed the cap.
        """
        with self.lock:
            wanted = _block_nbytes(nbytes)
            fitting = [block for block in self.free if block.nbytes >= wanted and block.device == device]
            if fitting:
                block = min(fitting, key=lambda block: block.nbytes)
                self.free.remove(block)
            else:
                self._close_free(lambda block: block.device == device)  # each is too small
                self._check(wanted, cap)
                block = PinnedBlock(wanted, device, self.allocator)
            self.in_use.append(block)
            return block

    def release(self, block: PinnedBlock) -> None:
        with self.lock:
            self.in_use.remove(block)
            self.free.append(block)
            self._trim()

    def _trim(self) -> None:
        def needed(device: torch.device) -> int:
            return max((nbytes for nbytes, other in self.reservations if other == device), default=0)

        self._close_free(lambda block: block.nbytes > needed(block.device))

    def _close_free(self, unwanted: Callable[[PinnedBlock], bool]) -> None:
        for block in [block for block in self.free if unwanted(block)]:
            self.free.remove(block)
            block.close()

    def _check(self, nbytes: int, cap: int | None) -> None:
        allowed = self.cap() if cap is None else cap
        if self.nbytes + nbytes > allowed:
            state = f", {self.claimed} of it by state" if self.claimed else ""
            raise PinnedError(
                f"{nbytes} bytes of pinned host memory are wanted, but {self.nbytes} are taken (by {len(self.in_use)} "
                f'running steps{state}) and {allowed} allowed; allow more with host=, e.g. host="16GB", or for the '
                f"whole process with {VARIABLE}=16GB, have fewer steps running, or plan with offload=None"
            )


def _block_nbytes(nbytes: int) -> int:
    return whole_pages(max(nbytes, 1))


def cap_nbytes() -> int:
    """Return the most bytes that may be pinned: MEMGRAPH_PINNED, or half of the host's memory.

    Raises:
        ValueError: the variable can't be read.
    """
    named = os.environ.get(VARIABLE)
    return asked_nbytes(named, CPU, NAMED) if named else memory_nbytes(CPU) // 2


def host_nbytes(host: str | int | float | None) -> int | None:
    """Return the bytes of host memory that the option `host` allows; None if not given.

    Raises:
        ValueError: it can't be read, is not positive, or is more than the host has.
    """
    return None if host is None else asked_nbytes(host, CPU, HOST)


class CudaPinnedAllocator:
    """Pins pages with CUDA."""

    def __init__(self) -> None:
        self.devices: dict[int, torch.device] = {}  # by address

    def register(self, flat: Tensor, device: torch.device) -> str:
        populate_pages(flat)
        try:
            with torch.cuda.device(device):  # cudaHostRegister registers for the current one
                cudart: Any = torch.cuda.cudart()
                code = int(cudart.cudaHostRegister(flat.data_ptr(), flat.nbytes, REGISTER_FLAGS))
            why = f"cudaHostRegister says {code}" if code else ""
        except RuntimeError as error:
            why = str(error)
        if why:
            with contextlib.suppress(RuntimeError):  # the next launch would report the error once more, as its own
                torch.zeros(1, device=device)
        else:
            self.devices[flat.data_ptr()] = device
        return why

    def unregister(self, flat: Tensor) -> None:
        if torch.cuda._is_in_bad_fork():  # a child, in which CUDA is not initialized
            return
        # A kernel or a copy may still use the pages, and CUDA does not promise to wait for it.
        torch.cuda.synchronize(self.devices.pop(flat.data_ptr()))
        cudart: Any = torch.cuda.cudart()
        cudart.cudaHostUnregister(flat.data_ptr())


# Mutable state of the module: what may be pinned is bounded for the process, whatever models it has.
PINNED_POOL = PinnedPool(cap_nbytes, CudaPinnedAllocator())


def populate_pages(flat: Tensor) -> None:
    """Populate the pages of a tensor that begins at a page."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not flat.nbytes:
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address, nbytes = flat.data_ptr(), flat.nbytes
    madvise(address, nbytes, MADV_HUGEPAGE)
    with ThreadPoolExecutor(min(MOST, os.cpu_count() or 1)) as threads:
        for begin in range(0, nbytes, PART):
            threads.submit(madvise, address + begin, min(PART, nbytes - begin), MADV_POPULATE_WRITE)
