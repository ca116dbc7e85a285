"""Which rows each part has.

64 rows in 4 parts                      ->   0:16, 16:32, 32:48, 48:64
4 sequences of 10 tokens in 2 parts     ->   sequences 0:2, sequences 2:4
4 sequences of 10 tokens in 8 parts     ->   tokens 0:5 and 5:10 of each sequence

A part is whole sequences, or tokens of one sequence, so that it is a view of a tensor [sequences, tokens, ...].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .row_rule import Dims


@dataclass(frozen=True, slots=True)
class PartRows:
    """Rows [begin, end) of a part, where a sequence has `tokens`; 0 if rows are not divided into sequences."""

    begin: int
    end: int
    tokens: int = 0

    @property
    def count(self) -> int:
        return self.end - self.begin

    def shape(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        """Return the shape of a part of a tensor."""
        sizes = (self.count,) if dims[1] - dims[0] == 1 else tuple(e - b for b, e in self._of_each())
        return (*shape[: dims[0]], *sizes, *shape[dims[1] :])

    def views(self, shape: tuple[int, ...], dims: Dims) -> Iterator[tuple[int, int, int]]:
        """Yield dimension, begin and end of each view that leads from a tensor to the part."""
        ranges = [(self.begin, self.end)] if dims[1] - dims[0] == 1 else self._of_each()
        for dim, (begin, end) in enumerate(ranges, dims[0]):
            if (begin, end) != (0, shape[dim]):
                yield dim, begin, end

    def _of_each(self) -> list[tuple[int, int]]:
        """Return the range of sequences, and that of tokens."""
        first, last = self.begin // self.tokens, (self.end - 1) // self.tokens
        tokens = (0, self.tokens) if last > first else (self.begin - first * self.tokens, self.end - first * self.tokens)
        return [(first, last + 1), tokens]


def part_rows(rows: int, tokens: int, parts: int) -> tuple[PartRows, ...]:
    """Return the rows of about so many parts, of nearly equal sizes."""
    if not tokens:
        return tuple(PartRows(begin, end) for begin, end in _ranges(rows, parts))
    sequences = rows // tokens
    if parts <= sequences:
        return tuple(PartRows(b * tokens, e * tokens, tokens) for b, e in _ranges(sequences, parts))
    ranges = list(_ranges(tokens, -(-parts // sequences)))
    return tuple(PartRows(s * tokens + b, s * tokens + e, tokens) for s in range(sequences) for b, e in ranges)


def _ranges(count: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield ranges whose sizes differ by one at most."""
    parts = min(parts, count)
    ends = [count * i // parts for i in range(parts + 1)]
    yield from zip(ends, ends[1:], strict=False)
