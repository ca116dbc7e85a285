"""Let activations lie on disk between forward and backward, so that the RAM they took is free in between.

Before:                   After:
    a = relu(x)               a = relu(x)
    ...                       lease.offload(0, a)      # two threads copy, while the next ops run
    ...                       lease.free(0); del a     # the bytes have left
    ...                       a = empty(...)
    ...                       lease.reload(0, a)       # the threads copy back
    ...                       lease.wait(0)            # the bytes are there
    g = relu_bwd(a)           g = relu_bwd(a)

Where the bytes lie is `spill.py`, how they are copied `copies.py`; here is which copy waits for which.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, chain

import torch

from ..system.user_warning import warn_user
from .async_copy import Copy, CopyChunk, CopyFunction, CopyLog, finish_copies
from .io_threads import STAGING, IoThread, read, start, write
from .mapped_storage import BufferSlice, FileMapping
from .spill_file import PAGE, SpillError, is_ram, spill_folder, unnamed_file, whole_pages


class DiskTier:
    """Room on disk for the activations of a step; `slots` are their bytes, `staging` the RAM that the copies take."""

    def __init__(self, slots: Sequence[int], folder: str | os.PathLike[str] | None = None) -> None:
        self.closed = False
        self.process = os.getpid()  # whose files these are
        self.bound: Mapping[int, BufferSlice] = {}  # slots that are places of the state, and no file of a lease's own
        self.files: list[int] = []  # files that no lease has
        self.slots = tuple(slots)
        *self.offsets, self.nbytes = accumulate(map(whole_pages, self.slots), initial=0)
        self.staging = STAGING  # one set of buffers for all tiers of the process
        self.folder = spill_folder(folder)
        if is_ram(self.folder):
            message = f"{self.folder} is in RAM, so what is offloaded there frees no memory"
            warn_user(f"{message}: name a folder on a disk with spill_dir=")
        start()  # here, because a step should pay neither their time nor their memory
        self.files.append(self._make_room())

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        """Let slots be where tensors of the state live: there is always something to reload, and an offload stays."""
        self.bound = bound

    def lease(self) -> DiskLease:
        """Room for one step in flight; a new file is made if all others are out."""
        if self.closed:
            raise ValueError("this tier is closed")
        if self.process != os.getpid():  # a child of fork, whose parent goes on in the same files
            self._give_up()
            self.process = os.getpid()
        return DiskLease(self, self.files.pop() if self.files else self._make_room())

    def close(self) -> None:
        """Give the disk its bytes back, those of a running lease as soon as it is released."""
        self.closed = True
        self._give_up()

    def return_file(self, file: int, process: int) -> None:
        """The lease that a process has had is given back."""
        if process != self.process:
            os.close(file)
            return
        self.files.append(file)
        if self.closed:
            self._give_up()

    def __del__(self) -> None:
        self.close()

    def _give_up(self) -> None:
        while self.files:
            os.close(self.files.pop())

    def _make_room(self) -> int:
        return unnamed_file(self.folder, max(self.nbytes, PAGE))


class DiskLease:
    """The file of one step in flight.  Used by one thread at a time."""

    def __init__(self, tier: DiskTier, file: int) -> None:
        self.tier = tier
        self.bound = tier.bound  # as they are now: a later step may find the state elsewhere
        self.file: int | None = file
        self.process = os.getpid()
        self.out: dict[int, Copy] = {}
        self.back: dict[int, Copy] = {}
        self.copies: CopyLog = {write: [], read: []}  # what the workers have taken up
        self.dropped = False

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        """Let slots be elsewhere than the tier was told."""
        self.bound = {**self.bound, **bound}

    def offload(self, slot: int, tensor: torch.Tensor) -> None:
        """Start to copy the bytes of `tensor` out; they must not change until `free`."""
        self._refuse_inherited()
        finish_copies(self.out.get(slot), self.back.get(slot))
        self._start(self.out, slot, tensor, write)

    def free(self, slot: int) -> None:
        """Wait until the copy out has ended."""
        self._refuse_inherited()
        slot_copy(slot, self.out, "offloaded").end()

    def reload(self, slot: int, tensor: torch.Tensor) -> None:
        """Start to fill `tensor` with what was offloaded, as soon as that has ended."""
        self._refuse_inherited()
        leaving = () if slot in self.bound else slot_copy(slot, self.out, "offloaded").chunks
        finish_copies(self.back.get(slot))
        self._start(self.back, slot, tensor, read, after=leaving)

    def wait(self, slot: int) -> None:
        """Wait until the copy back has ended."""
        self._refuse_inherited()
        slot_copy(slot, self.back, "reloaded").end()

    def release(self) -> None:
        """Drop the copies that have not begun, wait for those that have, and give the file back."""
        self.dropped = True
        # The garbage collector may call this in a worker, which cannot wait for itself.  `__del__` is yet to come.
        if not isinstance(threading.current_thread(), IoThread):
            # No thread of a parent's is here to end a copy.
            for part in chain(*self.copies.values()) if self.process == os.getpid() else ():
                part.wait()
            self._give_back()

    def __del__(self) -> None:
        # Nothing is to be waited for: a job holds its lease.
        self._give_back()

    def _give_back(self) -> None:
        self.out, self.back = {}, {}
        self.copies = {write: [], read: []}
        file, self.file = self.file, None
        if file is not None:
            self.tier.return_file(file, self.process)

    def _start(
        self,
        copies: dict[int, Copy],
        slot: int,
        tensor: torch.Tensor,
        move: CopyFunction,
        after: Sequence[CopyChunk] = (),
    ) -> None:
        copies[slot] = copy = Copy(move, self._where(slot), tensor, f"in {self.tier.folder}")
        # The guard holds the lease, and the lease the tensors: none is collected before the worker is done.
        copy.begin(partial(self._take_up, self.copies[move]), after)

    def _where(self, slot: int) -> tuple[int, int, int]:
        """File, offset and bytes of a slot."""
        file, home = self._room(), self.bound.get(slot)
        if home is None:
            return file, self.tier.offsets[slot], self.tier.slots[slot]
        assert isinstance(home.mapping, FileMapping)
        return home.mapping.file, home.offset, home.nbytes

    def _take_up(self, begun: list[CopyChunk], part: CopyChunk) -> None:
        begun.append(part)  # first, so that either `release` waits for it or it sees that the lease is dropped
        self._room()

    def _refuse_inherited(self) -> None:
        """
        Raises:
            SpillError: a child of fork goes on with what its parent had begun.
        """
        if self.process != os.getpid():
            raise SpillError(
                "this step began before the process was forked, and what it offloaded is its parent's: call the "
                "module again in the child"
            )

    def _room(self) -> int:
        if self.file is None or self.dropped:
            raise ValueError("this lease is released")
        return self.file


def slot_copy(slot: int, copies: dict[int, Copy], verb: str) -> Copy:
    """The copy of a slot.

    Raises:
        ValueError: there is none, as nothing was offloaded there or reloaded.
    """
    if slot not in copies:
        raise ValueError(f"slot {slot} was not {verb} in this lease; those that were: {sorted(copies)}")
    return copies[slot]
