"""Keep activations in files between forward and backward, so that their bytes of the device are free in between.

Before:                   After:
    a = relu(x)               a = relu(x)
    ...                       lease.offload(0, a)      # two threads copy, while the next ops run
    ...                       lease.free(0); del a     # the copy has ended
    ...                       a = empty(...)
    ...                       lease.reload(0, a)       # the threads copy back
    ...                       lease.wait(0)            # the bytes are there
    g = relu_bwd(a)           g = relu_bwd(a)

`file_space.py` makes the files and `async_copy.py` copies; this file decides which copy waits for which.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain

import torch

from ..system.user_warning import warn_user
from .async_copy import Copy, CopyChunk, finish_copies
from .file_space import Space, file_space
from .io_threads import STAGING, CopyFunction, IoThread, moves_in, start
from .mapped_storage import BufferSlice, OpenFile
from .spill_file import PAGE, SpillError, whole_pages
from .transfer import moves_of


class FileTier:
    """Files for the activations of a step; `slots` are their bytes, `staging` the RAM that copies take."""

    def __init__(self, slots: Sequence[int], space: Space = None) -> None:
        self.closed = False
        self.process = os.getpid()  # that made the files
        self.bound: Mapping[int, BufferSlice] = {}  # slots that hold offloaded state, outside of a lease's file
        self.files: list[int] = []  # that no lease has
        self.slots = tuple(slots)
        *self.offsets, self.nbytes = accumulate(map(whole_pages, self.slots), initial=0)
        self.space = file_space(space)
        if self.space.frees_nothing:
            message = f"{self.space} is in RAM, so what is offloaded there frees no memory"
            warn_user(f"{message}: name a folder on a disk with spill_dir=")
        start(self.space.is_memory)  # here, because a step should pay neither for their start nor for their memory
        self.staging = 0 if self.space.is_memory else STAGING  # one set of buffers for all disks
        self.space.users.add(self)
        self.files.append(self._make_file())

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        """Let slots be slices of offloaded state: these can be reloaded at any time, and an offload is kept."""
        self.bound = bound

    def lease(self) -> FileLease:
        """Return a file for one run of the step; a new one is made if all others are leased."""
        if self.closed:
            raise ValueError("this tier is closed")
        if self.process != os.getpid():  # a child of fork, whose parent still uses the same files
            self._close_files()
            self.process = os.getpid()
        return FileLease(self, self.files.pop() if self.files else self._make_file())

    def close_idle(self) -> None:
        """Close the files that no lease has; a later lease makes a new one."""
        if self.process == os.getpid():
            self._close_files()

    def close(self) -> None:
        """Free the bytes on disk, those of a running lease as soon as it is released."""
        self.closed = True
        self._close_files()

    def return_file(self, file: int, process: int) -> None:
        """Take back the file of a lease that `process` had."""
        if process != self.process:
            os.close(file)
            return
        self.files.append(file)
        if self.closed:
            self._close_files()

    def __del__(self) -> None:
        self.close()

    def _close_files(self, close: Callable[[int], None] = os.close) -> None:  # `os` is gone when Python ends
        while self.files:
            close(self.files.pop())

    def _make_file(self) -> int:
        return self.space.open(max(self.nbytes, PAGE))


class FileLease:
    """The file of one run of a step. Used by one thread at a time."""

    def __init__(self, tier: FileTier, file: int) -> None:
        self.tier = tier
        self.bound = tier.bound  # of this run: a later one may find the state elsewhere
        self.file: int | None = file
        self.moves = moves_in(tier.space.in_memory(file))
        self.process = os.getpid()
        self.out: dict[int, Copy] = {}
        self.back: dict[int, Copy] = {}
        self.copies: dict[CopyFunction, list[CopyChunk]] = defaultdict(list)  # what the threads have begun
        self.dropped = False

    def time_copies(self) -> None:
        """Do nothing: the threads record times of all copies."""

    def bind(self, bound: Mapping[int, BufferSlice]) -> None:
        """Let slots be elsewhere than the tier was told."""
        self.bound = {**self.bound, **bound}

    def offload(self, slot: int, tensor: torch.Tensor) -> None:
        """Start to copy the bytes of `tensor` out; they must not change until `free`."""
        self._refuse_inherited()
        finish_copies(self.out.get(slot), self.back.get(slot))
        self._start(self.out, slot, tensor, 0)

    def free(self, slot: int) -> None:
        """Wait until the copy out has ended."""
        self._refuse_inherited()
        slot_copy(slot, self.out, "offloaded").end()

    def reload(self, slot: int, tensor: torch.Tensor) -> None:
        """Start to fill `tensor` with what was offloaded, as soon as that has ended."""
        self._refuse_inherited()
        after = () if slot in self.bound else slot_copy(slot, self.out, "offloaded").chunks
        finish_copies(self.back.get(slot))
        self._start(self.back, slot, tensor, 1, after)

    def wait(self, slot: int) -> None:
        """Wait until the copy back has ended."""
        self._refuse_inherited()
        slot_copy(slot, self.back, "reloaded").end()

    def release(self) -> None:
        """Drop the copies that have not begun, wait for those that have, and return the file."""
        self.dropped = True
        # The garbage collector may call this in an I/O thread, which cannot wait for itself; `__del__` follows then.
        if not isinstance(threading.current_thread(), IoThread):
            if self.process == os.getpid():  # after a fork no thread of the parent is here to end a copy
                for chunk in chain(*self.copies.values()):
                    chunk.wait()
            self._return_file()

    def __del__(self) -> None:
        # No wait is needed: a running job references its lease.
        self._return_file()

    def _return_file(self) -> None:
        self.out, self.back = {}, {}
        self.copies.clear()
        file, self.file = self.file, None
        if file is not None:
            self.tier.return_file(file, self.process)

    def _start(
        self, copies: dict[int, Copy], slot: int, tensor: torch.Tensor, direction: int,
        after: Sequence[CopyChunk] = (),
    ) -> None:  # fmt: skip
        bound = self.bound.get(slot)
        move = (moves_of(bound) if bound is not None else self.moves)[direction]
        copies[slot] = copy = Copy(move, self._where(slot), tensor, f"in {self.tier.space}")
        # The guard references the lease, and that the tensors: none is collected before the thread is done.
        copy.begin(partial(self._log, self.copies[move]), after)

    def _where(self, slot: int) -> tuple[int, int, int]:
        """File, offset and bytes of a slot."""
        file, bound = self._own_file(), self.bound.get(slot)
        if bound is None:
            return file, self.tier.offsets[slot], self.tier.slots[slot]
        assert isinstance(bound.mapping, OpenFile)
        return bound.mapping.file, bound.offset, bound.nbytes

    def _log(self, log: list[CopyChunk], chunk: CopyChunk) -> None:
        log.append(chunk)  # first, so that either `release` waits for it or it sees that the lease is dropped
        self._own_file()

    def _refuse_inherited(self) -> None:
        if self.process != os.getpid():
            raise SpillError(
                "this step began before the process was forked, and what it offloaded is its parent's: call the "
                "module again in the child"
            )

    def _own_file(self) -> int:
        if self.file is None or self.dropped:
            raise ValueError("this lease is released")
        return self.file


def slot_copy(slot: int, copies: dict[int, Copy], verb: str) -> Copy:
    """Return the copy of a slot.

    Raises:
        ValueError: nothing was offloaded there, or reloaded.
    """
    if slot not in copies:
        raise ValueError(f"slot {slot} was not {verb} in this lease; those that were: {sorted(copies)}")
    return copies[slot]
