"""The rows of each part.

64 rows in 4 parts                      ->   0:16, 16:32, 32:48, 48:64
4 sequences of 10 tokens in 2 parts     ->   sequences 0:2, sequences 2:4
4 sequences of 10 tokens in 8 parts     ->   tokens 0:5 and 5:10 of each sequence

A part is whole sequences, or tokens of one sequence, so that it is a view of a tensor [sequences, tokens, ...]. A
dimension with several times as many elements as there are rows has so many of them in each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .row_rule import Dims


@dataclass(frozen=True, slots=True)
class PartRows:
    """Rows [begin, end) of a part.

    Attributes:
        rows: of all parts together.
        tokens: of a sequence; 0 if rows are not divided into sequences.
    """

    begin: int
    end: int
    rows: int
    tokens: int = 0

    @property
    def count(self) -> int:
        return self.end - self.begin

    def shape(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        """Return the shape of a part of a tensor."""
        sizes = tuple(end - begin for begin, end in self._ranges(shape, dims))
        return (*shape[: dims[0]], *sizes, *shape[dims[1] :])

    def views(self, shape: tuple[int, ...], dims: Dims) -> Iterator[tuple[int, int, int]]:
        """Yield dimension, begin and end of each view that leads from a tensor to the part."""
        for dim, (begin, end) in enumerate(self._ranges(shape, dims), dims[0]):
            if (begin, end) != (0, shape[dim]):
                yield dim, begin, end

    def _ranges(self, shape: tuple[int, ...], dims: Dims) -> list[tuple[int, int]]:
        """Return the range of each dimension: of rows, or of sequences and tokens."""
        if dims[1] - dims[0] == 1:
            each = shape[dims[0]] // self.rows
            return [(self.begin * each, self.end * each)]
        first, last = self.begin // self.tokens, (self.end - 1) // self.tokens
        tokens = (
            (0, self.tokens) if last > first else (self.begin - first * self.tokens, self.end - first * self.tokens)
        )
        return [(first, last + 1), tokens]


def part_rows(rows: int, tokens: int, parts: int) -> tuple[PartRows, ...]:
    """Return the rows of about so many parts, of nearly equal sizes."""
    if not tokens:
        return tuple(PartRows(begin, end, rows) for begin, end in _ranges(rows, parts))
    sequences = rows // tokens
    if parts <= sequences:
        return tuple(PartRows(b * tokens, e * tokens, rows, tokens) for b, e in _ranges(sequences, parts))
    ranges = list(_ranges(tokens, -(-parts // sequences)))
    return tuple(PartRows(s * tokens + b, s * tokens + e, rows, tokens) for s in range(sequences) for b, e in ranges)


def _ranges(count: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield ranges whose sizes differ by one at most."""
    parts = min(parts, count)
    ends = [count * i // parts for i in range(parts + 1)]
    yield from itertools.pairwise(ends)
