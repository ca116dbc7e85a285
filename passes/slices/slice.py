"""A slice: ops that run in parts, each on some of the rows.

slice 1024 rows of 256 in 16 parts: mm[0:1<0:1,-] _log_softmax[0:1<0:1] ...

Rows of 256 means that a sequence has 256 of them; it is left out where rows are not divided into sequences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from .part_rows import PartRows, part_rows
from .row_rule import RowRule, parse_rule


@dataclass(frozen=True)
class Slice:
    """Run these ops in parts of the rows.

    Attributes:
        rows: of all parts together.
        tokens: rows of a sequence; 0 if rows are not divided into sequences.
        parts: into which they are divided, about.
        rules: how each op runs on some of the rows, in the order of the trace.
        reruns: bytes from which on backward makes a forward value again, which is not kept; 0: all are kept.
    """

    rows: int
    tokens: int
    parts: int
    rules: tuple[tuple[str, RowRule], ...]
    reruns: int = 0

    @cached_property
    def rule(self) -> dict[str, RowRule]:
        return dict(self.rules)

    @cached_property
    def part_rows(self) -> tuple[PartRows, ...]:
        return part_rows(self.rows, self.tokens, self.parts)

    def __str__(self) -> str:
        of = f" of {self.tokens}" if self.tokens else ""
        ops = " ".join(f"{name}[{rule}]" for name, rule in self.rules)
        again = f", values from {self.reruns} bytes again" if self.reruns else ""
        return f"slice {self.rows} rows{of} in {self.parts} parts{again}: {ops}"


LINE = re.compile(r"slice (\d+) rows(?: of (\d+))? in (\d+) parts(?:, values from (\d+) bytes again)?: (.+)")
OP = re.compile(r"([^\s[]+)\[([^]]+)\]")


def parse_slice(line: str) -> Slice:
    """Return the slice that `line` prints.

    Raises:
        ValueError: the line is no slice.
    """
    if match := LINE.fullmatch(line):
        rows, tokens, parts, again, ops = match.groups()
        rules = tuple((name, parse_rule(rule)) for name, rule in OP.findall(ops))
        found = Slice(int(rows), int(tokens or 0), int(parts), rules, int(again or 0))
        if str(found) == line:
            return found
    raise ValueError(f"not a slice: {line!r}\nwrite e.g.: slice 64 rows in 4 parts: mm[0:1<0:1,-] relu[0:1<0:1]")
