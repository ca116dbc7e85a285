"""Let activations lie on disk between forward and backward, so that the RAM they took is free in between.

Before:                   After:
    a = relu(x)               a = relu(x)
    ...                       lease.offload(0, a)      # two threads copy, while the next ops run
    ...                       lease.free(0); del a     # the bytes have left
    ...                       a = empty(...)
    ...                       lease.reload(0, a)       # the threads copy back
    ...                       lease.wait(0)            # the bytes are there
    g = relu_bwd(a)           g = relu_bwd(a)

Where the bytes lie is `spill.py`, who copies them is `workers.py`; here is who waits for whom.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch

from .homes import Place
from .spill import PAGE, SpillError, is_ram, nameless_file, pages, spill_folder
from .workers import CHUNK, STAGING, WORKERS, Latch, Worker, read, start, submit, write

__all__ = ["STAGING", "DiskLease", "DiskTier", "SpillError", "spill_folder"]

Move = Callable[[int, int, int, int], None]  # file, offset, address, nbytes


class DiskTier:
    """Room on disk for the activations of a step; `slots` are their bytes, `staging` the RAM that the copies take."""

    def __init__(self, slots: Sequence[int], folder: str | os.PathLike[str] | None = None) -> None:
        self.closed = False
        self.homes: Mapping[int, Place] = {}  # slots that are places of the state, and no room of a lease's own
        self.rooms: list[int] = []  # files that no lease has
        self.slots = tuple(slots)
        *self.offsets, self.nbytes = accumulate(map(pages, self.slots), initial=0)
        self.staging = STAGING  # one set of buffers for all tiers of the process
        self.folder = spill_folder(folder)
        if is_ram(self.folder):
            message = f"{self.folder} is in RAM, so what is offloaded there frees no memory"
            warnings.warn(f"{message}: name a folder on a disk with spill_dir=", RuntimeWarning, stacklevel=2)
        start()  # here, because a step should pay neither their time nor their memory
        self.rooms.append(self._make_room())

    def bind(self, homes: Mapping[int, Place]) -> None:
        """Let slots be where tensors of the state live: there is always something to reload, and an offload stays."""
        self.homes = homes

    def lease(self) -> DiskLease:
        """Room for one step in flight; a new file is made if all others are out."""
        if self.closed:
            raise ValueError("this tier is closed")
        return DiskLease(self, self.rooms.pop() if self.rooms else self._make_room())

    def close(self) -> None:
        """Give the disk its bytes back, those of a running lease as soon as it is released."""
        self.closed = True
        while self.rooms:
            os.close(self.rooms.pop())

    def take_back(self, room: int) -> None:
        self.rooms.append(room)
        if self.closed:
            self.close()

    def __del__(self) -> None:
        self.close()

    def _make_room(self) -> int:
        return nameless_file(self.folder, max(self.nbytes, PAGE))


class DiskLease:
    """The room of one step in flight.  Used by one thread at a time."""

    def __init__(self, tier: DiskTier, room: int) -> None:
        self.tier = tier
        self.homes = tier.homes  # as they are now: a later step may find the state elsewhere
        self.room: int | None = room
        self.out: dict[int, Copy] = {}
        self.back: dict[int, Copy] = {}
        self.begun: list[Part] = []  # what the workers have taken up
        self.dropped = False

    def bind(self, homes: Mapping[int, Place]) -> None:
        """Let slots be elsewhere than the tier was told."""
        self.homes = {**self.homes, **homes}

    def offload(self, slot: int, tensor: torch.Tensor) -> None:
        """Start to copy the bytes of `tensor` out; they must not change until `free`."""
        settle(self.out.get(slot), self.back.get(slot))
        self._start(self.out, slot, tensor, write)

    def free(self, slot: int) -> None:
        """Wait until the copy out has ended."""
        copy_of(slot, self.out, "offloaded").end()

    def reload(self, slot: int, tensor: torch.Tensor) -> None:
        """Start to fill `tensor` with what was offloaded, as soon as that has ended."""
        leaving = () if slot in self.homes else copy_of(slot, self.out, "offloaded").parts
        settle(self.back.get(slot))
        self._start(self.back, slot, tensor, read, after=leaving)

    def wait(self, slot: int) -> None:
        """Wait until the copy back has ended."""
        copy_of(slot, self.back, "reloaded").end()

    def speeds(self) -> tuple[float, float]:
        """Bytes per microsecond out and back, while such copies ran; 0.0 where none has ended."""
        return speed(self.out.values()), speed(self.back.values())

    def release(self) -> None:
        """Drop the copies that have not begun, wait for those that have, and give the room back."""
        self.dropped = True
        # The garbage collector may call this in a worker, which cannot wait for itself.  `__del__` is yet to come.
        if not isinstance(threading.current_thread(), Worker):
            for part in self.begun:
                part.wait()
            self._give_back()

    def __del__(self) -> None:
        # Nothing is to be waited for: a job holds its lease.
        self._give_back()

    def _give_back(self) -> None:
        self.out, self.back, self.begun = {}, {}, []
        room, self.room = self.room, None
        if room is not None:
            self.tier.take_back(room)

    def _start(
        self, copies: dict[int, Copy], slot: int, tensor: torch.Tensor, move: Move, after: Sequence[Part] = ()
    ) -> None:
        file, offset, nbytes = self._where(slot)
        address = address_of(tensor, nbytes)
        copies[slot] = copy = Copy(f"to {move.__name__} {nbytes} bytes in {self.tier.folder}", tensor)
        # Half for each worker, so that one copies memory while the other waits for the disk.
        share = max(CHUNK, pages(-(-nbytes // WORKERS)))
        for at in range(0, nbytes, share):
            copy.parts.append(part := Part(min(share, nbytes - at)))
            # The job holds the lease, and the lease the tensors: none is collected before the worker is done.
            submit(partial(self._run, part, after, move, file, offset + at, address + at, min(share, nbytes - at)))

    def _where(self, slot: int) -> tuple[int, int, int]:
        """File, offset and bytes of a slot."""
        room, home = self._room(), self.homes.get(slot)
        return (home.file, home.offset, home.nbytes) if home else (room, self.tier.offsets[slot], self.tier.slots[slot])

    def _run(self, part: Part, after: Sequence[Part], move: Move, *place: int) -> None:
        self.begun.append(part)  # first, so that either `release` waits for it or it sees that the lease is dropped
        try:
            # Parts begin in the order in which they were submitted, so two workers never wait for each other.
            for earlier in after:
                earlier.end()
            part.begin = time.perf_counter()
            self._room()
            move(*place)
            part.ended = time.perf_counter()
        except Exception as error:
            part.error = error.with_traceback(None)  # whose frames hold the lease
        finally:
            part.open()

    def _room(self) -> int:
        if self.room is None or self.dropped:
            raise ValueError("this lease is released")
        return self.room


class Part(Latch):
    """What one worker does of a copy.  Opens when that has ended, well or not.  Its times are seconds."""

    error: Exception | None = None
    begin = ended = 0.0

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes

    def end(self) -> None:
        self.wait()
        if self.error:
            raise self.error


class Copy:
    """A copy under way.  It holds its tensor until it is known to have ended."""

    def __init__(self, what: str, tensor: torch.Tensor) -> None:
        self.what = what
        self.tensor: torch.Tensor | None = tensor
        self.parts: list[Part] = []

    def end(self) -> None:
        """Wait for every part, then let the tensor go."""
        settle(self)
        self.tensor = None
        for part in self.parts:
            if part.error:
                advice = "if this disk is failing or full, name another folder with spill_dir="
                raise SpillError(f"failed {self.what}: {part.error}; {advice}") from part.error


def copy_of(slot: int, copies: dict[int, Copy], verb: str) -> Copy:
    if slot not in copies:
        raise ValueError(f"slot {slot} was not {verb} in this lease; those that were: {sorted(copies)}")
    return copies[slot]


def settle(*copies: Copy | None) -> None:
    """Wait until `copies` have ended, well or not."""
    for part in [part for copy in copies if copy for part in copy.parts]:
        part.wait()


def speed(copies: Iterable[Copy]) -> float:
    """Bytes per microsecond in which any of `copies` moved; 0.0 if none has ended."""
    parts = sorted((part for copy in copies for part in copy.parts if part.ended), key=lambda part: part.begin)
    busy = until = 0.0
    for part in parts:
        busy += max(0.0, part.ended - max(part.begin, until))
        until = max(until, part.ended)
    return sum(part.nbytes for part in parts) / busy / 1e6 if busy else 0.0


def address_of(tensor: torch.Tensor, nbytes: int) -> int:
    """Where the bytes of `tensor` begin, provided that they are `nbytes` in one run."""
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    if tensor.device.type != "cpu" or tensor.nbytes != nbytes or not dense:
        found = f"{tensor.nbytes} on {tensor.device} with shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        raise ValueError(f"a slot of {nbytes} bytes takes a dense CPU tensor of as many, not {found}")
    return tensor.data_ptr()
