"""Rows of the linear program for the links: how many bytes they can carry by when.

    10 ms in 32 stages, 100 bytes per microsecond   ->   out[0] <= 31250 + 100 extra_us[0]
                                                         out[1] <= out[0] + 31250 + 100 extra_us[1], ...

A curve for each direction replaces a schedule of copies.  It rises to the bytes that may have left, or must be back, by
the end of each stage.  Links go on while compute waits, casts, or recomputes.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from .columns import MIB, Columns, Terms
from .linear_program import INFINITY, LinearProgram
from .problem import PlanProblem
from .state_rows import compute_us, gradient_mib, reloaded_mib, update_us

STAGES = 128


@dataclass(frozen=True)
class Curve:
    """One direction in one phase: where its stages begin, and a column of carried MiB for each; empty if unused."""

    begins: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()

    def by(self, position: int) -> int | None:
        """Return the column of a position's stage."""
        return self.carried[window_stage(self.begins, position)] if self.carried else None

    def before(self, position: int) -> int | None:
        """Return the column of the stage before; None in the first stage."""
        j = window_stage(self.begins, position)
        return self.carried[j - 1] if j else None


@dataclass(frozen=True)
class LinkRows:
    """The curves of both directions in both phases."""

    out: Curve
    back: Curve
    forward_back: Curve
    backward_out: Curve
    boundary: int

    @classmethod
    def add(cls, lp: LinearProgram, columns: Columns) -> LinkRows:
        """Add the curves and their rows to a linear program."""
        forward, backward = _stages(columns.problem)
        writer = _CurveWriter(lp, columns)
        out = writer.out(forward)
        forward_back = writer.forward_back(forward)
        if columns.problem.machine.link.half_duplex and columns.state.offload:
            writer.half_duplex()
        back = writer.back(backward, forward_back)
        return cls(out, back, forward_back, writer.backward_out(backward), columns.problem.boundary)

    def offloaded_by(self, position: int) -> int | None:
        """Return the column of the MiB that have left by the end of a position's stage."""
        return self.out.by(position)

    def reloaded_before(self, position: int) -> int | None:
        """Return the column of the MiB that are back before a position's stage; None in the first of its phase."""
        return (self.back if position >= self.boundary else self.forward_back).before(position)


def window_stage(begins: tuple[int, ...], position: int) -> int:
    """Return the stage of a position."""
    return max(0, bisect.bisect_right(begins, position) - 1)


def _stages(problem: PlanProblem) -> tuple[list[int], list[int]]:
    """Return the ends of the stages of forward, and of backward."""
    begins, boundary, end = problem.gaps.begins, problem.boundary, problem.copies_end
    share = begins[boundary] / begins[-1] if begins[-1] else 0.5
    count = min(max(2, int(STAGES * share)), STAGES - 2)
    forward, backward = Counter[int](), Counter[int]()
    for storage, need in zip(problem.storages, problem.last_needs, strict=True):
        if storage.can_offload:
            forward[storage.last_forward + 1] += storage.nbytes
            backward[need] += storage.nbytes
    for state in problem.states:
        for first, last in state.uses:
            position = last + 1 if state.is_gradient else first
            (forward if position < boundary else backward)[position] += state.nbytes
    return _cut(begins, 0, boundary, count, forward), _cut(begins, boundary, end, STAGES - count, backward)


def _cut(begins: tuple[float, ...], first: int, last: int, count: int, nbytes: Mapping[int, int]) -> list[int]:
    """Cut a phase into stages of nearly equal time, each at the position where most bytes may leave or must be back."""
    length = begins[last] - begins[first]
    cuts = [bisect.bisect_left(begins, begins[first] + length * k / count, first, last) for k in range(1, count)]
    inner = [max(range(a, b), key=lambda p: nbytes.get(p, 0)) for a, b in pairwise([first, *cuts, last]) if a < b]
    return sorted({first, last, *inner})


class _CurveWriter:
    """Adds curves to a linear program; `waits` are the microseconds that compute waits in forward and in backward."""

    def __init__(self, lp: LinearProgram, columns: Columns) -> None:
        self.lp, self.columns, self.problem = lp, columns, columns.problem
        self.copied = {i: columns.copied_mib(i) for i in columns.offload}
        self.waits = lp.add_column(1.0, most=INFINITY), lp.add_column(1.0, most=INFINITY)
        forward_us, backward_us = compute_us(columns)
        self.forward_us = self._copies_us(self.problem.machine.cast.out) | forward_us
        recompute_us = {column: each.us for column, each in zip(columns.recompute, self.problem.producers, strict=True)}
        self.backward_us = self._copies_us(self.problem.machine.cast.back) | recompute_us | backward_us

    def out(self, ends: list[int]) -> Curve:
        """Storages leave after their last use in forward, and before forward ends."""
        if not self.copied:
            return Curve()
        storages, boundary = self.problem.storages, self.problem.boundary
        curve = self._curve(ends, self.problem.machine.link.out, self.forward_us, self.waits[0])
        left = self._until(ends, lambda i: min(storages[i].last_forward + 2, boundary))
        for column, copied in zip(curve, left, strict=True):
            self._at_most(column, copied)
        self._at_least(curve[-1], left[-1])
        return Curve(tuple(ends[:-1]), curve)

    def forward_back(self, ends: list[int]) -> Curve:
        """State is back before its uses in forward."""
        columns, boundary = self.columns, self.problem.boundary
        if not (reloaded := reloaded_mib(columns, lambda first: first < boundary)):
            return Curve()
        curve = self._curve(ends, self.problem.machine.link.back, self.forward_us, self.waits[0])
        for column, end in zip(curve, ends[1:], strict=True):
            self._at_least(column, reloaded_mib(columns, lambda first: first <= end and first < boundary))  # noqa: B023
        self._at_most(curve[-1], reloaded)
        return Curve(tuple(ends[:-1]), curve)

    def back(self, ends: list[int], forward_back: Curve) -> Curve:
        """Storages and state are back before backward needs them."""
        link = self.problem.machine.link
        curve = self._curve(ends, link.back, self.backward_us, self.waits[1], forward_back.carried[-1:])
        needed = self._until(ends, lambda i: min(self.problem.last_needs[i], ends[-1]))
        for column, copied, end in zip(curve, needed, ends[1:], strict=True):
            self._at_least(column, copied | reloaded_mib(self.columns, lambda first: first <= end))  # noqa: B023
        return Curve(tuple(ends[:-1]), curve)

    def backward_out(self, ends: list[int]) -> Curve:
        """Gradients leave once they are complete, and before the update."""
        if not (gradients := gradient_mib(self.columns, self.problem.size)):
            return Curve()
        curve = self._curve(ends, self.problem.machine.link.out, self.backward_us, self.waits[1])
        for column, end in zip(curve, ends[1:], strict=True):
            self._at_most(column, gradient_mib(self.columns, end))
        self._at_least(curve[-1], gradients)
        return Curve(tuple(ends[:-1]), curve)

    def half_duplex(self) -> None:
        """Neither phase is shorter than all its copies, one after the other."""
        columns, link, boundary = self.columns, self.problem.machine.link, self.problem.boundary
        begins, end = self.problem.gaps.begins, self.problem.copies_end
        out, back = MIB / link.out, MIB / link.back
        forward_reloads = reloaded_mib(columns, lambda first: first < boundary)
        backward_reloads = reloaded_mib(columns, lambda first: first >= boundary)
        gradients = gradient_mib(columns, self.problem.size)
        copied = list(self.copied.values())
        forward = [*((terms, out) for terms in copied), (forward_reloads, back)]
        backward = [*((terms, back) for terms in copied), (backward_reloads, back), (gradients, out)]
        backward.append((update_us(columns), 1.0))
        for first, last, wait, compute, copies in (
            (0, boundary, self.waits[0], self.forward_us, forward),
            (boundary, end, self.waits[1], self.backward_us, backward),
        ):
            us = Terms({wait: 1.0, **compute})
            for terms, us_per_mib in copies:
                for column, mib in terms.items():
                    us[column] = us.get(column, 0.0) - mib * us_per_mib
            self.lp.add_row(begins[first] - begins[last], INFINITY, us)

    def _curve(
        self, ends: list[int], rate: float, compute: Terms, wait: int, start: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Add a column for each stage: at least the one before, at most what the link carries meanwhile.

        `compute`: the microseconds by which each decision prolongs the phase.
        """
        begins, carried, extra_us = self.problem.gaps.begins, list[int](), list[int]()
        for first, last in pairwise(ends):
            column = self.lp.add_column(most=INFINITY)
            extra_us.append(self.lp.add_column(most=INFINITY))
            before = dict.fromkeys(carried[-1:] or start, -1.0)
            length = begins[last] - begins[first]
            self.lp.add_row(-INFINITY, rate / MIB * length, {column: 1.0, extra_us[-1]: -rate / MIB, **before})
            if before:
                self.lp.add_row(0.0, INFINITY, {column: 1.0, **before})
            carried.append(column)
        decided = {column: -us for column, us in compute.items()}
        self.lp.add_row(-INFINITY, 0.0, {**dict.fromkeys(extra_us, 1.0), wait: -1.0, **decided})
        return tuple(carried)

    def _copies_us(self, cast_rate: float) -> Terms:
        """Return the microseconds that copies of storages in one direction, and their casts, take from compute."""
        storages, overhead_us = self.problem.storages, self.problem.machine.link.overhead_us
        terms = {column: overhead_us(storages[i].nbytes) for i, column in self.columns.offload.items()}
        for i, column in self.columns.cast_offload.items():
            terms[column] = storages[i].nbytes / cast_rate + overhead_us(storages[i].wire_nbytes)
        return terms

    def _at_most(self, column: int, terms: Terms) -> None:
        self.lp.add_row(-INFINITY, 0.0, {column: 1.0, **{c: -mib for c, mib in terms.items()}})

    def _at_least(self, column: int, terms: Terms) -> None:
        self.lp.add_row(0.0, INFINITY, {column: 1.0, **{c: -mib for c, mib in terms.items()}})

    def _until(self, ends: list[int], position: Callable[[int], int]) -> list[Terms]:
        """For the end of each stage, return the MiB of the storages whose `position` is not behind it."""
        return [
            {column: mib for i, copied in self.copied.items() if position(i) <= end for column, mib in copied.items()}
            for end in ends[1:]
        ]
