"""Copy between memory and a file in parts, while the caller goes on.

    copy = Copy(read, where, tensor, "of the state")
    copy.begin(guard)    # two threads read
    ...                  # other work meanwhile
    copy.end()           # the bytes are there, or an error says why not

Who copies is `workers.py`; here is who waits for whom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ..tensors.layout import is_dense
from .io_threads import CHUNK, WORKERS, OneShotEvent, read, submit, write
from .spill_file import SpillError, advice_for, whole_pages

CopyFunction = Callable[[int, int, int, int], None]  # file, offset, address, nbytes


class CopyChunk(OneShotEvent):
    """What one worker does of a copy.  Opens when that has ended, well or not.  Its times are seconds."""

    error: Exception | None = None
    started = ended = 0.0

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes

    def end(self) -> None:
        self.wait()
        if self.error:
            raise self.error


CopyLog = dict[CopyFunction, list[CopyChunk]]  # what was begun of copies, by whether it is written or read
CopyGuard = Callable[[CopyChunk], object]  # is called before bytes move, and may raise what is against it


class Copy:
    """A copy of a file's bytes and a tensor's.  It holds the tensor until it is known to have ended."""

    def __init__(self, move: CopyFunction, where: tuple[int, int, int], tensor: Tensor, place: str) -> None:
        """`where`: file, offset and bytes; `place` is what an error calls the file.

        Raises:
            ValueError: the tensor has other bytes, or not in one run.
        """
        self.move, self.where = move, where
        self.address = address_of(tensor, where[2])
        self.what = f"to {move.__name__} {where[2]} bytes {place}"
        self.tensor: Tensor | None = tensor
        self.chunks: list[CopyChunk] = []

    def begin(self, guard: CopyGuard, after: Sequence[CopyChunk] = ()) -> None:
        """Have the workers copy once `after` have ended; if one of those failed, nothing is copied.

        Until then, and no longer, the workers hold `guard`, which has to hold the tensor and the file.
        """
        file, offset, nbytes = self.where
        # Half for each worker, so that one copies memory while the other waits for the disk.
        share = max(CHUNK, whole_pages(-(-nbytes // WORKERS)))
        for at in range(0, nbytes, share):
            self.chunks.append(part := CopyChunk(min(share, nbytes - at)))
            submit(partial(_run, part, [guard], after, self.move, file, offset + at, self.address + at, part.nbytes))

    def end(self) -> None:
        """Wait for every part, then let the tensor go."""
        finish_copies(self)
        self.tensor = None
        for part in self.chunks:
            if part.error:
                advice = advice_for(part.error, "if this disk is failing or full, name another folder with spill_dir=")
                raise SpillError(f"failed {self.what}: {part.error}; {advice}") from part.error


class ChunkedCopy(Protocol):
    """A copy in parts that can be waited for."""

    chunks: Any


def finish_copies(*copies: ChunkedCopy | None) -> None:
    """Wait until `copies` have ended, well or not."""
    for part in [part for copy in copies if copy for part in copy.chunks]:
        part.wait()


def copy_rates(*moved: CopyLog) -> tuple[float, float]:
    """Bytes per microsecond written and read, while such parts moved; 0.0 if none has ended.

    Where both moved, each part has an equal share of that time.
    """
    ways = [[part for each in moved for part in each.get(move, ()) if part.ended] for move in (write, read)]
    moments = [(part.started, 1, way) for way, parts in enumerate(ways) for part in parts]
    moments += [(part.ended, -1, way) for way, parts in enumerate(ways) for part in parts]
    busy, moving, before = [0.0, 0.0], [0, 0], 0.0
    for at, change, way in sorted(moments):
        for each in (0, 1):
            busy[each] += moving[each] / max(1, sum(moving)) * (at - before)
        moving[way] += change
        before = at
    sums = (sum(part.nbytes for part in parts) for parts in ways)
    out, back = (nbytes / seconds / 1e6 if seconds else 0.0 for nbytes, seconds in zip(sums, busy, strict=True))
    return out, back


def address_of(tensor: Tensor, nbytes: int) -> int:
    """Where the bytes of `tensor` begin, provided that they are `nbytes` in one run."""
    if tensor.device.type != "cpu" or tensor.nbytes != nbytes or not is_dense(tensor):
        found = f"{tensor.nbytes} on {tensor.device} with shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        raise ValueError(f"a slot of {nbytes} bytes takes a dense CPU tensor of as many, not {found}")
    return tensor.data_ptr()


def _run(part: CopyChunk, held: list[CopyGuard], after: Sequence[CopyChunk], move: CopyFunction, *where: int) -> None:
    try:
        held[0](part)
        # Parts begin in the order in which they were submitted, so two workers never wait for each other.
        for earlier in after:
            earlier.end()
        part.started = time.perf_counter()
        move(*where)
        part.ended = time.perf_counter()
    except Exception as error:
        part.error = error.with_traceback(None)  # whose frames hold what the guard holds
    finally:
        held.clear()  # before anybody goes on, who may count what is left: the worker has yet to drop its job
        part.open()
