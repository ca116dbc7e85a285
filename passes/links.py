"""How many bytes the links carry by when: one cumulative curve a direction, over stages of nearly equal time.

    10 ms in 32 stages, 100 bytes per microsecond   ->   D_0 <= 31250 + 100 e_0,  D_1 <= D_0 + 31250 + 100 e_1, ...

Curves in place of a schedule of copies: bytes that may have left by a time, and those that must be back by a time.
Links carry on while compute waits, casts, or runs ops again.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .linear import INFINITY
from .program import Program

if TYPE_CHECKING:
    from .model import Model

STAGES = 128
MIB = float(1 << 20)


@dataclass(frozen=True)
class Curve:
    """One direction: the positions at which its stages begin, and D_j or P_j."""

    begins: tuple[int, ...]
    carried: tuple[int, ...]


@dataclass(frozen=True)
class Links:
    """The curves of both directions."""

    out: Curve
    back: Curve

    @classmethod
    def of(cls, model: Model) -> Links:
        """Write the rows of both directions."""
        out_ends, back_ends = _stages(model.program)
        curves = _Curves(model)
        return cls(curves.out(out_ends), curves.back(back_ends))

    def leaving(self, position: int) -> int:
        """D_j of a forward position's stage."""
        return self.out.carried[stage(self.out.begins, position)]

    def coming(self, position: int) -> int | None:
        """P_j of the stage before a backward position's; None in the first stage."""
        j = stage(self.back.begins, position)
        return self.back.carried[j - 1] if j else None


def stage(begins: tuple[int, ...], position: int) -> int:
    return max(0, bisect.bisect_right(begins, position) - 1)


def _stages(program: Program) -> tuple[list[int], list[int]]:
    """The ends of the stages of forward and of backward."""
    begins, boundary = program.gaps.begins, program.boundary
    share = begins[boundary] / begins[-1] if begins[-1] else 0.5
    forward = min(max(2, int(STAGES * share)), STAGES - 2)
    left, used = dict[int, int](), dict[int, int]()
    for item, due in zip(program.items, program.due, strict=True):
        if item.leaves:
            left[item.left + 1] = left.get(item.left + 1, 0) + item.nbytes
            used[due] = used.get(due, 0) + item.nbytes
    return _cut(begins, 0, boundary, forward, left), _cut(begins, boundary, program.size, STAGES - forward, used)


def _cut(begins: tuple[float, ...], first: int, last: int, count: int, nbytes: dict[int, int]) -> list[int]:
    """Positions from `first` to `last` that cut the time between them into nearly equal parts: in each part that at
    which the most bytes may begin to leave, or have to be back."""
    length = begins[last] - begins[first]
    cuts = [bisect.bisect_left(begins, begins[first] + length * k / count, first, last) for k in range(1, count)]
    inner = [max(range(a, b), key=lambda p: nbytes.get(p, 0)) for a, b in pairwise([first, *cuts, last]) if a < b]
    return sorted({first, last, *inner})


class _Curves:
    """Writes curves."""

    def __init__(self, model: Model) -> None:
        self.model, self.program, self.linear = model, model.program, model.linear
        self.sent = {i: model.sent(i) for i in model.away}

    def out(self, ends: list[int]) -> Curve:
        """What has left; what has been used for the last time may leave; all leaves before forward ends."""
        items, boundary, machine = self.program.items, self.program.boundary, self.program.machine
        busy = self._tolls(machine.narrow)
        curve = self._curve(ends, machine.out, busy)
        left = self._until(ends, lambda i: min(items[i].left + 2, boundary))
        for column, sent in zip(curve, left, strict=True):
            self.linear.row(-INFINITY, 0.0, {column: 1.0, **{c: -m for c, m in sent.items()}})
        self.linear.row(-INFINITY, 0.0, {curve[-1]: -1.0, **left[-1]})
        return Curve(tuple(ends[:-1]), curve)

    def back(self, ends: list[int]) -> Curve:
        """What has come back; what is wanted has to."""
        machine = self.program.machine
        busy = self._tolls(machine.widen)
        busy |= {column: maker.us for column, maker in zip(self.model.again, self.program.makers, strict=True)}
        curve = self._curve(ends, machine.back, busy)
        for column, used in zip(curve, self._until(ends, lambda i: self.program.due[i]), strict=True):
            self.linear.row(0.0, INFINITY, {column: 1.0, **{c: -m for c, m in used.items()}})
        return Curve(tuple(ends[:-1]), curve)

    def _tolls(self, rate: float) -> dict[int, float]:
        """For how long compute is with what goes one way: its copies, and its casts at `rate`."""
        items, toll_us = self.program.items, self.program.machine.toll_us
        found = {column: toll_us(items[i].nbytes) for i, column in self.model.away.items()}
        return found | {
            column: items[i].nbytes / rate + toll_us(items[i].wire) for i, column in self.model.cast.items()
        }

    def _curve(self, ends: list[int], rate: float, busy: dict[int, float]) -> tuple[int, ...]:
        """A column for each stage, none below the one before, and none above what the link carries meanwhile; `busy`:
        for how long each column makes compute do what the captured step does not."""
        begins, carried, longer = self.program.gaps.begins, list[int](), list[int]()
        for first, last in pairwise(ends):
            column = self.linear.column(most=INFINITY)
            longer.append(self.linear.column(most=INFINITY))
            before = {carried[-1]: -1.0} if carried else {}
            length = begins[last] - begins[first]
            self.linear.row(-INFINITY, rate / MIB * length, {column: 1.0, longer[-1]: -rate / MIB, **before})
            if before:
                self.linear.row(0.0, INFINITY, {column: 1.0, **before})
            carried.append(column)
        waited = self.linear.column(1.0, most=INFINITY)
        spent = {column: -us for column, us in busy.items()}
        self.linear.row(-INFINITY, 0.0, {**dict.fromkeys(longer, 1.0), waited: -1.0, **spent})
        return tuple(carried)

    def _until(self, ends: list[int], when: Callable[[int], int]) -> list[dict[int, float]]:
        """For the end of each stage the columns of L_s, with their MiB, whose position is not behind it."""
        return [
            {column: mib for i, sent in self.sent.items() if when(i) <= end for column, mib in sent.items()}
            for end in ends[1:]
        ]
