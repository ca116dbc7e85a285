"""A rule by which an op runs on some of its rows.

    mm(a, b)    f32[64, 8], f32[8, 100] -> f32[64, 100]

    0:1<0:1,-      dimension 0 of its result are the rows of a; b is whole
    1:2<-,1:2      dimension 1 are the columns of b; a is whole
    +<1:2,0:1      results of parts of both are added up

Rows are one or two neighbouring dimensions, [begin, end): a batch of sequences has as many rows as it has tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Dims = tuple[int, int]
WHOLE, SUM = "-", "+"


@dataclass(frozen=True, slots=True)
class RowRule:
    """One way in which an op runs in parts.

    Attributes:
        makes: the dimensions of its result that are rows; None: results of parts are added up.
        reads: for each value that it reads, the dimensions that are rows; None: each part reads the whole.
    """

    makes: Dims | None
    reads: tuple[Dims | None, ...]

    def __str__(self) -> str:
        return _print(self.makes, SUM) + "<" + ",".join(_print(dims, WHOLE) for dims in self.reads)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """The ways in which an op runs in parts.

    Attributes:
        rules: the ways; none if it can't.
        linear: groups of reads, by position. The op is linear in the reads of a group together, while others are fixed;
            in some of them it need not be, as in x of x + y.
    """

    rules: tuple[RowRule, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()

    def is_linear(self, reads: set[int]) -> bool:
        """Return True if the op is linear in these reads together."""
        return any(reads == set(group) for group in self.linear)


def parse_rule(text: str) -> RowRule:
    """Return the rule that `text` prints.

    Raises:
        ValueError: it is not a rule.
    """
    makes, separator, reads = text.partition("<")
    if not separator:
        raise ValueError(f"not a rule of rows: {text!r}; write e.g.: 0:1<0:1,-")
    return RowRule(_parse(makes, SUM), tuple(_parse(dims, WHOLE) for dims in reads.split(",") if dims))


def type_shape(type: str) -> tuple[int, ...]:
    """Return the shape of a tensor that is printed as `type`: (64, 8) of "f32[64, 8]"."""
    return tuple(int(size) for size in type.partition("[")[2].removesuffix("]").split(",") if size.strip())


def rows_of(shape: tuple[int, ...], dims: Dims) -> int:
    """Return the number of rows."""
    return math.prod(shape[dims[0] : dims[1]])


def _print(dims: Dims | None, none: str) -> str:
    return none if dims is None else f"{dims[0]}:{dims[1]}"


def _parse(text: str, none: str) -> Dims | None:
    if text == none:
        return None
    begin, _, end = text.partition(":")
    return int(begin), int(end)
