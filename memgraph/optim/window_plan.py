"""Split the tensors of an update into windows of few bytes.

    w  f32[1000000], with its gradient and two states        ->   w[0:262144]            window 0
    b  f32[1000], likewise                                        w[262144:524288]       window 1
    windows of 4 MiB                                              ...
                                                                  w[786432:1000000], b   window 3

A chunk is a range of a parameter's elements in the order of its memory. It begins at a page of every tensor that it is
taken from, so that it can be copied past the page cache.

Where a chunk ends can be seen in the last bit of a low-precision result: kernels take whole vectors of elements, and
the rest one by one, which rounds differently. So a low-precision parameter stays whole where it fits a window. Where it
does not, its chunks are whole vectors, and so short that threads do not divide them: they give what a single thread
gives on the whole parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..storage.spill_file import PAGE

SERIAL = 16384  # elements; threads do not divide fewer than 32768
LINE = 64  # bytes to which each tensor in a window is aligned


@dataclass(frozen=True)
class WindowRow:
    """A parameter in an update: its elements, and the bytes of an element in each of its tensors.

    One that is updated as a whole counts as one element. `buffered` tensors are copied to the window, `resident` ones
    are used where they are, and the update makes those in `created`.
    """

    count: int
    buffered: tuple[int, ...]
    resident: tuple[int, ...] = ()
    created: tuple[int, ...] = ()
    exact: bool = True  # results do not depend on where it is split

    def nbytes(self, count: int) -> int:
        """Bytes of `count` elements in all tensors."""
        return count * sum(self.buffered + self.resident + self.created)

    def buffer_nbytes(self, count: int) -> int:
        """Bytes that `count` elements take in the window."""
        return sum(aligned(count * itemsize) for itemsize in self.buffered)

    @property
    def granularity(self) -> int:
        """Elements of the shortest chunk."""
        return max(1, PAGE // min(self.buffered + self.resident + self.created))


@dataclass(frozen=True)
class WindowChunk:
    """The elements from `begin` to `end` of the parameter in a row."""

    row: int
    begin: int
    end: int
    whole: bool

    @property
    def count(self) -> int:
        return self.end - self.begin


Window = tuple[WindowChunk, ...]


def plan_windows(rows: Sequence[WindowRow], nbytes: int, first: int = 0, separate: bool = False) -> list[Window]:
    """Return the windows of an update, each with at most `nbytes` of parameters, gradients and states.

    Rows count from `first`; with `separate` no window holds chunks of two rows.

    Raises:
        ValueError: the shortest chunk of some parameter is larger than a window.
    """
    windows: list[list[WindowChunk]] = [[]]
    free = nbytes
    for i, row in enumerate(rows, first):
        if _fitting_count(row, 0, nbytes, nbytes) is None:
            least = row.nbytes(min(row.count, row.granularity))
            raise ValueError(f"windows of {nbytes} bytes hold no chunk of a parameter that wants {least} at least")
        begin, done = 0, False
        while not done:
            count = None if separate and not begin and windows[-1] else _fitting_count(row, begin, free, nbytes)
            if count is None:
                windows.append([])
                free = nbytes
                continue
            windows[-1].append(WindowChunk(i, begin, begin + count, count == row.count))
            free -= row.nbytes(count)
            begin += count
            done = begin == row.count
    return [tuple(window) for window in windows if window]


def _fitting_count(row: WindowRow, begin: int, free: int, nbytes: int) -> int | None:
    """The elements from `begin` on that fit the free bytes of a window of `nbytes`."""
    rest = row.count - begin
    limit = rest if row.exact else SERIAL
    if not row.exact and begin == 0 and row.nbytes(rest) <= nbytes:
        return rest if row.nbytes(rest) <= free else None  # it will fit the next window whole
    if rest <= limit and row.nbytes(rest) <= free:
        return rest
    granules = min(free // row.nbytes(row.granularity), limit // row.granularity)
    return granules * row.granularity or None


def range_boxes(tensor: Tensor, begin: int, end: int) -> list[Tensor]:
    """Return views that together are the elements from `begin` to `end` of a tensor of any strides, row by row."""
    if begin == end:
        return []
    if tensor.dim() <= 1:
        return [tensor.reshape(-1)[begin:end]]
    inner = tensor[0].numel()
    first, last = -(-begin // inner), end // inner
    if first > last:  # within one row
        return range_boxes(tensor[last], begin - last * inner, end - last * inner)
    boxes = range_boxes(tensor[first - 1], begin - (first - 1) * inner, inner) if begin < first * inner else []
    if first < last:
        boxes.append(tensor[first:last])
    return boxes + (range_boxes(tensor[last], 0, end - last * inner) if last * inner < end else [])


def aligned(nbytes: int) -> int:
    """Round bytes up to whole lines."""
    return -(-nbytes // LINE) * LINE
