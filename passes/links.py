"""How many bytes the links carry by when: one cumulative curve a direction, over stages of equal time.

    10 ms in 32 stages, 100 bytes per microsecond   ->   D_0 <= 31250 + 100 w_0,  D_1 <= D_0 + 31250 + 100 w_1, ...

Curves in place of a schedule of copies: bytes that may have left by a time, and those that must be back by a time.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from .linear import INFINITY, Linear
from .program import Program

STAGES = 64
MIB = float(1 << 20)


@dataclass(frozen=True)
class Links:
    """The curves' columns, and the positions at which their stages begin."""

    out_begins: tuple[int, ...]
    back_begins: tuple[int, ...]
    left: tuple[int, ...]
    come: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, linear: Linear, away: dict[int, int]) -> Links:
        """Write the rows of both directions."""
        out_ends, back_ends = _stages(program)
        curves = _Curves(program, linear, away)
        left = curves.out(out_ends)
        come = curves.back(back_ends)
        return cls(tuple(out_ends[:-1]), tuple(back_ends[:-1]), left, come)

    def leaving(self, position: int) -> int:
        """D_j of a forward position's stage."""
        return self.left[stage(self.out_begins, position)]

    def coming(self, position: int) -> int | None:
        """P_j of the stage before a backward position's; None in the first stage."""
        j = stage(self.back_begins, position)
        return self.come[j - 1] if j else None


def stage(begins: tuple[int, ...], position: int) -> int:
    return max(0, bisect.bisect_right(begins, position) - 1)


def _stages(program: Program) -> tuple[list[int], list[int]]:
    """The ends of the stages of forward and of backward."""
    begins, boundary = program.gaps.begins, program.boundary
    share = begins[boundary] / begins[-1] if begins[-1] else 0.5
    forward = min(max(2, int(STAGES * share)), STAGES - 2)
    return _cut(begins, 0, boundary, forward), _cut(begins, boundary, program.size, STAGES - forward)


def _cut(begins: tuple[float, ...], first: int, last: int, count: int) -> list[int]:
    """Positions from `first` to `last` that cut the time between them into equal parts, where there are that many."""
    length = begins[last] - begins[first]
    inner = {bisect.bisect_left(begins, begins[first] + length * k / count, first, last) for k in range(1, count)}
    return sorted({first, last, *inner})


class _Curves:
    """Writes curves."""

    def __init__(self, program: Program, linear: Linear, away: dict[int, int]) -> None:
        self.program, self.linear, self.away = program, linear, away

    def out(self, ends: list[int]) -> tuple[int, ...]:
        """What has left; what has been used for the last time may leave; all leaves before forward ends."""
        curve = self._curve(ends, self.program.machine.out)
        items = self.program.items
        for column, sent in zip(curve, self._until(ends, lambda i: items[i].left), strict=True):
            self.linear.row(-INFINITY, 0.0, {column: 1.0, **{c: -m for c, m in sent.items()}})
        self.linear.row(-INFINITY, 0.0, {curve[-1]: -1.0, **sent})
        return curve

    def back(self, ends: list[int]) -> tuple[int, ...]:
        """What has come back; what is used first has to."""
        curve = self._curve(ends, self.program.machine.back)
        items = self.program.items
        for column, used in zip(curve, self._until(ends, lambda i: items[i].use), strict=True):
            self.linear.row(0.0, INFINITY, {column: 1.0, **{c: -m for c, m in used.items()}})
        return curve

    def _curve(self, ends: list[int], rate: float) -> tuple[int, ...]:
        """A column for each stage, none below the one before, and none above what the link carries meanwhile."""
        begins, curve = self.program.gaps.begins, list[int]()
        for first, last in pairwise(ends):
            column = self.linear.column(most=INFINITY)
            waited = self.linear.column(1.0, most=INFINITY)
            before = {curve[-1]: -1.0} if curve else {}
            length = begins[last] - begins[first]
            self.linear.row(-INFINITY, rate / MIB * length, {column: 1.0, waited: -rate / MIB, **before})
            if before:
                self.linear.row(0.0, INFINITY, {column: 1.0, **before})
            curve.append(column)
        return tuple(curve)

    def _until(self, ends: list[int], when: Callable[[int], int]) -> list[dict[int, float]]:
        """For each stage the O_s, with their MiB, whose time lies in it or before."""
        begins = tuple(ends[:-1])
        stages = {i: stage(begins, when(i)) for i in self.away}
        items = self.program.items
        return [
            {column: items[i].nbytes / MIB for i, column in self.away.items() if stages[i] <= j}
            for j in range(len(begins))
        ]
