"""Pinned host memory: pool that are taken when a step is planned, lent to its flights, and bounded in all.

    SLABS.reserve(1 << 30, cuda)    a block of at least so many bytes is there from now on
    block = SLABS.acquire(1 << 30, cuda)    that one; another is made only if it is out
    SLABS.take_back(block)
    SLABS.unreserve(1 << 30, cuda)     what no plan needs any more goes back to the host

A block is whole pages of the process's own, registered with CUDA: exactly as many bytes as are wanted, where torch's
allocator of pinned memory rounds up to a power of two.  Steps that run one after the other share one block.  Where the
host does not pin, copies go to pageable memory, slower and waited for, after one warning.  Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable
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
PINNED = BudgetRequest("pinned", "the host", f"what {VARIABLE} names, or half of the host's memory")
NAMED = BudgetRequest(VARIABLE, "the host", "half of that")
REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped: pinned for all devices, which see it
MMAP_FLAGS = (
    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
)  # pages of the process's own, which are pinned faster than shared ones


class PinnedError(MemgraphError):
    """More pinned memory is wanted than may be taken."""


class PinnedAllocator(Protocol):
    """Who pins pages."""

    def register(self, flat: Tensor, device: torch.device) -> str:
        """Pin the pages of a tensor; why not, if that is refused."""
        ...

    def unregister(self, flat: Tensor) -> None:
        """Let the pages go, once no device is at them any more."""
        ...


@dataclass(eq=False)
class PinnedBlock:
    """`nbytes` bytes of whole pages; `pinned` says whether the host has pinned them."""

    nbytes: int
    device: torch.device
    allocator: PinnedAllocator
    bytes: Tensor = field(init=False)
    pinned: bool = False
    after: tuple[Any, ...] = ()  # events of the copies of the last flight that had it

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
        """Let running copies end, and give the pages back."""
        for event in self.after:
            event.synchronize()
        if self.pinned:
            self.pinned = False
            self.allocator.unregister(self.bytes)
        self.bytes = self.bytes[:0].clone()


class PinnedPool:
    """The pool of the process.  Who asks may bring a cap of its own: all of them together are no more than that then,
    and no more than `cap` otherwise."""

    def __init__(self, cap: Callable[[], int], allocator: PinnedAllocator) -> None:
        self.cap, self.allocator = cap, allocator
        self.free: list[PinnedBlock] = []
        self.in_use: list[PinnedBlock] = []
        self.reservations: list[tuple[int, torch.device]] = []
        self.claimed = 0  # bytes that are pinned for homes
        self.lock = threading.RLock()  # the collector may have a lease given back anywhere

    @property
    def nbytes(self) -> int:
        """The bytes of all pool, and of what else is pinned."""
        return self.claimed + sum(block.nbytes for block in (*self.free, *self.in_use))

    def claim(self, nbytes: int, cap: int | None = None) -> None:
        """So many bytes more are pinned by somebody else, or fewer.

        Raises:
            PinnedError: they would be more than the cap.
        """
        with self.lock:
            if nbytes > 0:
                self._check(nbytes, cap)
            self.claimed += nbytes

    def reserve(self, nbytes: int, device: torch.device, cap: int | None = None) -> None:
        """Have a block of `nbytes` for a plan.

        Raises:
            PinnedError: there would be more of them than the cap.
        """
        with self.lock:
            block = self.acquire(nbytes, device, cap)
            self.reservations.append((_whole(nbytes), device))
            self.release(block)

    def unreserve(self, nbytes: int, device: torch.device) -> None:
        """One plan less needs so many; what is larger than all others need is given up."""
        with self.lock:
            self.reservations.remove((_whole(nbytes), device))
            self._trim()

    def acquire(self, nbytes: int, device: torch.device, cap: int | None = None) -> PinnedBlock:
        """A block of at least `nbytes`, for one flight.

        Raises:
            PinnedError: there would be more of them than the cap.
        """
        with self.lock:
            wanted = _whole(nbytes)
            fitting = [block for block in self.free if block.nbytes >= wanted and block.device == device]
            if fitting:
                block = min(fitting, key=lambda block: block.nbytes)
                self.free.remove(block)
            else:
                self._give_up(lambda block: block.device == device)  # each is too small
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
        self._give_up(
            lambda block: block.nbytes > max((n for n, d in self.reservations if d == block.device), default=0)
        )

    def _give_up(self, unwanted: Callable[[PinnedBlock], bool]) -> None:
        for block in [block for block in self.free if unwanted(block)]:
            self.free.remove(block)
            block.close()

    def _check(self, nbytes: int, asked: int | None) -> None:
        cap = self.cap() if asked is None else asked
        if self.nbytes + nbytes > cap:
            state = f", {self.claimed} of it by state" if self.claimed else ""
            raise PinnedError(
                f"{nbytes} bytes of pinned host memory are wanted, but {self.nbytes} are taken (by {len(self.in_use)} "
                f'steps in flight{state}) and {cap} allowed; allow more with pinned=, e.g. pinned="16GB", or for the '
                f"whole process with {VARIABLE}=16GB, have fewer steps in flight, or plan with offload=None"
            )


def _whole(nbytes: int) -> int:
    """Whole pages, one at least."""
    return whole_pages(max(nbytes, 1))


def cap_nbytes() -> int:
    """The most bytes that may be pinned: what MEMGRAPH_PINNED says, or half of the host's memory.

    Raises:
        ValueError: it says something that can't be read.
    """
    named = os.environ.get(VARIABLE)
    return asked_nbytes(named, CPU, NAMED) if named else memory_nbytes(CPU) // 2


def pinned_nbytes(pinned: str | int | float | None) -> int | None:
    """The bytes that `pinned` means: the most that may be pinned in all when a step asks for some; None if not given.

    Raises:
        ValueError: it can't be read, is not positive, or is more than the host has.
    """
    return None if pinned is None else asked_nbytes(pinned, CPU, PINNED)


class CudaPinnedAllocator:
    """CUDA's way to pin."""

    def __init__(self) -> None:
        self.devices: dict[int, torch.device] = {}  # by the address of what is pinned

    def register(self, flat: Tensor, device: torch.device) -> str:
        try:
            with torch.cuda.device(device):  # of which such memory is said to be
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
        if torch.cuda._is_in_bad_fork():  # a child, which has no part in it
            return
        # A kernel or a copy may still be at it that nobody waits for, and CUDA does not promise to.
        torch.cuda.synchronize(self.devices.pop(flat.data_ptr()))
        cudart: Any = torch.cuda.cudart()
        cudart.cudaHostUnregister(flat.data_ptr())


PINNED_POOL = PinnedPool(cap_nbytes, CudaPinnedAllocator())
