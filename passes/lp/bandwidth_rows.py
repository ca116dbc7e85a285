"""How many bytes the links carry by when: one cumulative curve a direction, over stages of nearly equal time.

    10 ms in 32 stages, 100 bytes per microsecond   ->   D_0 <= 31250 + 100 e_0,  D_1 <= D_0 + 31250 + 100 e_1, ...

Curves in place of a schedule of copies: bytes that may have left by a time, and those that must be back by a time.
Links carry on while compute waits, casts, or runs ops again.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .problem import PlanProblem
from .rows import MIB
from .solver import INFINITY

if TYPE_CHECKING:
    from .model import PlanModel

STAGES = 128
Terms = dict[int, float]


@dataclass(frozen=True)
class Curve:
    """One direction in one phase: the positions at which its stages begin, and D_j or P_j; empty, if nothing moves."""

    begins: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()

    def by(self, position: int) -> int | None:
        """The column of a position's stage."""
        return self.carried[window_stage(self.begins, position)] if self.carried else None

    def before(self, position: int) -> int | None:
        """The column of the stage before; None in the first."""
        j = window_stage(self.begins, position)
        return self.carried[j - 1] if j else None


@dataclass(frozen=True)
class LinkRows:
    """The curves of both directions in both phases."""

    out: Curve
    back: Curve
    forward_back: Curve  # back in forward
    backward_out: Curve  # out in backward
    boundary: int

    @classmethod
    def of(cls, model: PlanModel) -> LinkRows:
        """Write the rows of both directions."""
        forward, backward = _stages(model.problem)
        curves = _Curves(model)
        out = curves.out(forward)
        fetch = curves.fetch(forward)
        if model.problem.machine.link.half_duplex and model.state.offload:
            curves.turns()
        return cls(out, curves.back(backward, fetch), fetch, curves.home(backward), model.problem.boundary)

    def offloaded_by(self, position: int) -> int | None:
        """D_j of a position's stage."""
        return self.out.by(position)

    def reloaded_before(self, position: int) -> int | None:
        """P_j of the stage before a position's in the same phase; None in the first stage."""
        return (self.back if position >= self.boundary else self.forward_back).before(position)


def window_stage(begins: tuple[int, ...], position: int) -> int:
    return max(0, bisect.bisect_right(begins, position) - 1)


def _stages(program: PlanProblem) -> tuple[list[int], list[int]]:
    """The ends of the stages of forward and of backward."""
    begins, boundary, end = program.gaps.begins, program.boundary, program.copies_end
    share = begins[boundary] / begins[-1] if begins[-1] else 0.5
    forward = min(max(2, int(STAGES * share)), STAGES - 2)
    early, late = Counter[int](), Counter[int]()
    for item, due in zip(program.storages, program.last_needs, strict=True):
        if item.can_offload:
            early[item.last_forward + 1] += item.nbytes
            late[due] += item.nbytes
    for resident in program.states:
        for first, last in resident.uses:
            place = last + 1 if resident.is_gradient else first
            (early if place < boundary else late)[place] += resident.nbytes
    return _cut(begins, 0, boundary, forward, early), _cut(begins, boundary, end, STAGES - forward, late)


def _cut(begins: tuple[float, ...], first: int, last: int, count: int, nbytes: Mapping[int, int]) -> list[int]:
    """Positions from `first` to `last` that cut the time between them into nearly equal parts: in each part that at
    which the most bytes may begin to leave, or have to be back."""
    length = begins[last] - begins[first]
    cuts = [bisect.bisect_left(begins, begins[first] + length * k / count, first, last) for k in range(1, count)]
    inner = [max(range(a, b), key=lambda p: nbytes.get(p, 0)) for a, b in pairwise([first, *cuts, last]) if a < b]
    return sorted({first, last, *inner})


class _Curves:
    """Writes curves; `waits` are what compute waits in forward and in backward."""

    def __init__(self, model: PlanModel) -> None:
        self.model, self.program, self.linear = model, model.problem, model.lp
        self.sent = {i: model.copied_mib(i) for i in model.offload}
        self.waits = self.linear.add_column(1.0, most=INFINITY), self.linear.add_column(1.0, most=INFINITY)
        early, late = model.state.compute_us(model)
        self.early = self._tolls(self.program.machine.cast.out) | early
        again = {column: maker.us for column, maker in zip(model.recompute, self.program.producers, strict=True)}
        self.late = self._tolls(self.program.machine.cast.back) | again | late

    def out(self, ends: list[int]) -> Curve:
        """What has left; what has been used for the last time may leave; all leaves before forward ends."""
        if not self.sent:
            return Curve()
        items, boundary = self.program.storages, self.program.boundary
        curve = self._curve(ends, self.program.machine.link.out, self.early, self.waits[0])
        left = self._until(ends, lambda i: min(items[i].last_forward + 2, boundary))
        for column, sent in zip(curve, left, strict=True):
            self._at_most(column, sent)
        self._at_least(curve[-1], left[-1])
        return Curve(tuple(ends[:-1]), curve)

    def fetch(self, ends: list[int]) -> Curve:
        """What of the state has come for forward; all that forward wants has, when it ends."""
        far, boundary = self.model.state, self.program.boundary
        if not (wanted := far.reloaded_mib(self.model, lambda first: first < boundary)):
            return Curve()
        curve = self._curve(ends, self.program.machine.link.back, self.early, self.waits[0])
        for column, end in zip(curve, ends[1:], strict=True):
            self._at_least(column, far.reloaded_mib(self.model, lambda first: first <= end and first < boundary))  # noqa: B023
        self._at_most(curve[-1], wanted)
        return Curve(tuple(ends[:-1]), curve)

    def back(self, ends: list[int], fetched: Curve) -> Curve:
        """What has come back; what is wanted has to."""
        far = self.model.state
        curve = self._curve(ends, self.program.machine.link.back, self.late, self.waits[1], fetched.carried[-1:])
        last = ends[-1]
        used = self._until(ends, lambda i: min(self.program.last_needs[i], last))
        for column, sent, end in zip(curve, used, ends[1:], strict=True):
            self._at_least(column, sent | far.reloaded_mib(self.model, lambda first: first <= end))  # noqa: B023
        return Curve(tuple(ends[:-1]), curve)

    def home(self, ends: list[int]) -> Curve:
        """What of the gradients has left; all leaves before the update."""
        far = self.model.state
        if not (sent := far.offloaded_mib(self.model, self.program.size)):
            return Curve()
        curve = self._curve(ends, self.program.machine.link.out, self.late, self.waits[1])
        for column, end in zip(curve, ends[1:], strict=True):
            self._at_most(column, far.offloaded_mib(self.model, end))
        self._at_least(curve[-1], sent)
        return Curve(tuple(ends[:-1]), curve)

    def turns(self) -> None:
        """Neither phase takes less time than a tier that carries one way at a time does for all that it carries."""
        model, machine, boundary = self.model, self.program.machine, self.program.boundary
        begins, end = self.program.gaps.begins, self.program.copies_end
        out, back = MIB / machine.link.out, MIB / machine.link.back
        come = model.state.reloaded_mib(model, lambda first: first < boundary)
        more = model.state.reloaded_mib(model, lambda first: first >= boundary)
        gone = model.state.offloaded_mib(model, self.program.size)
        sent = list(self.sent.values())
        early = [*((terms, out) for terms in sent), (come, back)]
        late = [*((terms, back) for terms in sent), (more, back), (gone, out), (model.state.update_us(model), 1.0)]
        for first, last, waits, busy, moves in (
            (0, boundary, self.waits[0], self.early, early),
            (boundary, end, self.waits[1], self.late, late),
        ):
            us = Terms({waits: 1.0, **busy})
            for terms, each in moves:
                for column, amount in terms.items():
                    us[column] = us.get(column, 0.0) - amount * each
            self.linear.add_row(begins[first] - begins[last], INFINITY, us)

    def _curve(
        self, ends: list[int], rate: float, busy: dict[int, float], waits: int, start: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """A column for each stage, none below the one before, and none above what the link carries meanwhile; `busy`:
        for how long each column makes compute do what the captured step does not."""
        begins, carried, longer = self.program.gaps.begins, list[int](), list[int]()
        for first, last in pairwise(ends):
            column = self.linear.add_column(most=INFINITY)
            longer.append(self.linear.add_column(most=INFINITY))
            before = dict.fromkeys(carried[-1:] or start, -1.0)
            length = begins[last] - begins[first]
            self.linear.add_row(-INFINITY, rate / MIB * length, {column: 1.0, longer[-1]: -rate / MIB, **before})
            if before:
                self.linear.add_row(0.0, INFINITY, {column: 1.0, **before})
            carried.append(column)
        spent = {column: -us for column, us in busy.items()}
        self.linear.add_row(-INFINITY, 0.0, {**dict.fromkeys(longer, 1.0), waits: -1.0, **spent})
        return tuple(carried)

    def _tolls(self, rate: float) -> Terms:
        """For how long compute is with what goes one way: its copies, and its casts at `rate`."""
        items, toll_us = self.program.storages, self.program.machine.link.overhead_us
        found = {column: toll_us(items[i].nbytes) for i, column in self.model.offload.items()}
        return found | {
            column: items[i].nbytes / rate + toll_us(items[i].wire_nbytes)
            for i, column in self.model.cast_offload.items()
        }

    def _at_most(self, column: int, terms: dict[int, float]) -> None:
        self.linear.add_row(-INFINITY, 0.0, {column: 1.0, **{c: -mib for c, mib in terms.items()}})

    def _at_least(self, column: int, terms: dict[int, float]) -> None:
        self.linear.add_row(0.0, INFINITY, {column: 1.0, **{c: -mib for c, mib in terms.items()}})

    def _until(self, ends: list[int], when: Callable[[int], int]) -> list[dict[int, float]]:
        """For the end of each stage the columns of L_s, with their MiB, whose position is not behind it."""
        return [
            {column: mib for i, sent in self.sent.items() if when(i) <= end for column, mib in sent.items()}
            for end in ends[1:]
        ]
