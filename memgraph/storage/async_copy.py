"""Copy between memory and a file in chunks, while the caller continues.

    copy = Copy(read, (file, offset, nbytes), tensor, "of the state")
    copy.begin(guard)    # two threads read
    ...                  # other work meanwhile
    copy.end()           # the bytes are there, or SpillError says why not

The threads are in `io_threads.py`; this file decides which copy waits for which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ..tensors.layout import is_dense
from .io_threads import CHUNK, IN_MEMORY, WORKERS, CopyFunction, OneShotEvent, read, submit, write
from .spill_file import SpillError, advice_for, whole_pages


class CopyChunk(OneShotEvent):
    """The share of a copy that one thread does; set when it has ended, with or without an error. Times are seconds."""

    error: Exception | None = None
    started = ended = 0.0

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes

    def end(self) -> None:
        self.wait()
        if self.error:
            raise self.error


class TimedCopy(Protocol):
    """A copy that was begun; if it has ended without an error, `ended` is not 0. Times are seconds."""

    @property
    def nbytes(self) -> int: ...
    @property
    def started(self) -> float: ...
    @property
    def ended(self) -> float: ...


CopyLog = Mapping[CopyFunction, Sequence[TimedCopy]]  # all that were begun, by the function that moves the bytes
CopyGuard = Callable[[CopyChunk], object]  # called before bytes move; may raise to prevent it


class Copy:
    """A copy between a file and a tensor, which is referenced until the copy has ended."""

    def __init__(self, move: CopyFunction, where: tuple[int, int, int], tensor: Tensor, place: str) -> None:
        """`where`: file, offset and bytes; `place` is what an error calls the file.

        Raises:
            ValueError: the tensor has another size, or is not dense.
        """
        self.move, self.where = move, where
        self.address = _address_of(tensor, where[2])
        self.description = f"to {move.__name__} {where[2]} bytes {place}"
        self.tensor: Tensor | None = tensor
        self.chunks: list[CopyChunk] = []

    def begin(self, guard: CopyGuard, after: Sequence[CopyChunk] = ()) -> None:
        """Copy once `after` have ended; if one of those failed, nothing is copied.

        The threads reference `guard` until then, so it has to reference the tensor and the file.
        """
        file, offset, nbytes = self.where
        # Half for each thread, so that one copies memory while the other waits for the disk.
        share = max(CHUNK, whole_pages(-(-nbytes // WORKERS)))
        for at in range(0, nbytes, share):
            self.chunks.append(chunk := CopyChunk(min(share, nbytes - at)))
            where = file, offset + at, self.address + at, chunk.nbytes
            submit(partial(_run, chunk, [guard], after, self.move, *where), self.move in IN_MEMORY)

    def end(self) -> None:
        """Wait for every chunk, then release the tensor.

        Raises:
            SpillError: a chunk failed.
        """
        finish_copies(self)
        self.tensor = None
        for chunk in self.chunks:
            if chunk.error:
                advice = advice_for(chunk.error, "if this disk is failing or full, name another folder with spill_dir=")
                raise SpillError(f"failed {self.description}: {chunk.error}; {advice}") from chunk.error


class ChunkedCopy(Protocol):
    """A copy in chunks that can be waited for."""

    chunks: Any


def finish_copies(*copies: ChunkedCopy | None) -> None:
    """Wait until `copies` have ended, with or without an error."""
    for chunk in [chunk for copy in copies if copy for chunk in copy.chunks]:
        chunk.wait()


def copy_rates(*logs: CopyLog, half_duplex: bool, moves: Sequence[CopyFunction] = (write, read)) -> tuple[float, float]:
    """Return the bytes per microsecond written and read while copies of a tier ran, 0.0 if none has ended.

    While both directions of a half-duplex link were busy, each running copy has an equal share of the time.
    """
    directions = [[copy for log in logs for copy in log.get(move, ()) if copy.ended] for move in moves]
    changes = [(copy.started, 1, i) for i, copies in enumerate(directions) for copy in copies]
    changes += [(copy.ended, -1, i) for i, copies in enumerate(directions) for copy in copies]
    busy, running, before = [0.0, 0.0], [0, 0], 0.0
    for at, change, direction in sorted(changes):
        for i in (0, 1):
            others = sum(running) if half_duplex else running[i]
            busy[i] += running[i] / max(1, others) * (at - before)
        running[direction] += change
        before = at
    sums = (sum(copy.nbytes for copy in copies) for copies in directions)
    out, back = (nbytes / seconds / 1e6 if seconds else 0.0 for nbytes, seconds in zip(sums, busy, strict=True))
    return out, back


def _address_of(tensor: Tensor, nbytes: int) -> int:
    if tensor.device.type != "cpu" or tensor.nbytes != nbytes or not is_dense(tensor):
        actual = f"{tensor.nbytes} on {tensor.device} with shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        raise ValueError(f"a slot of {nbytes} bytes takes a dense CPU tensor of as many, not {actual}")
    return tensor.data_ptr()


def _run(
    chunk: CopyChunk, guards: list[CopyGuard], after: Sequence[CopyChunk], move: CopyFunction, *where: int
) -> None:
    try:
        guards[0](chunk)
        # Chunks begin in the order in which they were submitted, so two threads never wait for each other.
        for earlier in after:
            earlier.end()
        chunk.started = time.perf_counter()
        move(*where)
        chunk.ended = time.perf_counter()
    except Exception as error:
        chunk.error = error.with_traceback(None)  # its frames reference what the guard references
    finally:
        guards.clear()  # before a waiter counts references: the thread has yet to drop its job
        chunk.set()
