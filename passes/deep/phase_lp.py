"""The linear program of backward in phases: what is there when each begins, and what runs again in it.

    before 1548:    a, c            S_0a = S_0c = 1
    1549 ... 2864:  b again         N_1b = 1: b was not there, and is made from a; a goes
    2865 ...:       b, c            S_2b = S_2c = 1

Symbols as in `model`, and: q: a phase, which ends with the op at t_q, where backward was cut.  W(s): the makers that
read s and may run again.

    S_qs  s is there when phase q begins, for somebody later
    N_qo  o runs again in phase q, and what it makes was not there when the phase began

    minimise  sum c_o N_qo

    need        S_qs + N_qp(s) >= 1                          s that backward reads in q            _available
    chain       S_qs + N_qp(s) >= N_qw                       w in W(s)                             _available
    carry       S_qs + N_qp(s) >= S_q+1,s                                                          _available
    one form    S_qs + N_qp(s) <= 1                          s that is all p(s) makes              _available
    span        S_as + sum of N_rp(s) over r = a ... b >= S_bz + N_bw - S_az
                                                             z that is all w in W(s) makes, a < b  _spans
    forward t   base(t) + sum of m_s S_0s over f_s < t <= B                                        _forward
    cut q       used(t_q) + sum of m_s S_q+1,s over s that t_q does not read <= B                  _cut

Every plan that recomputes in backward only, however often, satisfies all rows: what is made again while it is there, or
a second time in a phase, is left out, and so is what lies there within a phase.  So the least objective is a lower
bound on the time that any such plan adds, wherever backward is cut.  Without the spans a value could
be made again by halves, half of it in each of two phases, from half of what it is made of.

Crumbs, small items that make up 0.1 % of the budget together, weigh nothing and are there throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..ir.arrays import Floats
from ..lp.columns import MIB
from ..lp.problem import Ints, PlanProblem
from ..lp.solver import INFINITY, LPSolver, SearchLimits, Solution

CRUMBS = 0.001  # of the budget
ROUNDS = 10  # of spans
BROKEN = 0.05  # by how much a span is, at which it gets its row
Columns = dict[int, int]


@dataclass(frozen=True, eq=False)
class Pieces:
    """What of a program can be decided: its items without crumbs, their makers, and how long each is wanted."""

    program: PlanProblem
    budget: int

    @cached_property
    def crumbs(self) -> frozenset[int]:
        order = np.argsort(self.program.nbytes, kind="stable")
        count = np.searchsorted(np.cumsum(self.program.nbytes[order]), CRUMBS * self.budget, side="right")
        return frozenset(map(int, order[:count]))

    @cached_property
    def items(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.program.storages)) if i not in self.crumbs)

    @cached_property
    def made(self) -> dict[int, tuple[int, ...]]:
        """The items of each maker that makes any."""
        found = {
            o: tuple(i for i in each.storages if i not in self.crumbs) for o, each in enumerate(self.program.producers)
        }
        return {o: items for o, items in found.items() if items}

    @cached_property
    def uses(self) -> dict[int, tuple[int, ...]]:
        """The backward positions that read each item."""
        return {i: self.program.gaps.uses.get(self.program.storages[i].storage, ()) for i in self.items}

    @cached_property
    def wanted(self) -> dict[int, int]:
        """The last position before which each item can be wanted."""
        last: dict[int, int] = {}
        found: dict[int, int] = {}
        for o in reversed(self.made):
            for i in self.made[o]:
                later = (last[w] for w in self.program.storages[i].readers if w in last)
                found[i] = max([-1, *self.uses[i][-1:], *later])
            if not self.program.producers[o].runs_once:
                last[o] = max(found[i] for i in self.made[o])
        return found


class Phases:
    """The columns and rows of a program, with backward cut behind some of its positions."""

    def __init__(self, pieces: Pieces, budget: int, cuts: tuple[int, ...], until: float) -> None:
        program = pieces.program
        self.pieces = pieces
        self.program = program
        self.budget = budget
        self.linear = LPSolver(until)
        self.ends = (*cuts, program.size - 1)
        self.begins = (program.boundary, *(cut + 1 for cut in cuts))
        self.stays: list[Columns] = [self._stays(begin) for begin in self.begins]
        self.again: list[Columns] = [self._again(begin) for begin in self.begins]
        for q in range(len(self.ends)):
            self._available(q)
        for position in self._tops():
            self._forward(position)
        for q in range(len(cuts)):
            self._cut(q)

    def solve(self) -> Solution | None:
        """The least point, with the spans that it breaks written; None if no plan at all fits the budget."""
        for _ in range(ROUNDS):
            solved = self.linear.solve()
            if solved is None or not self._spans(solved.values):
                return solved
        return self.linear.solve()

    def whole(self, effort: SearchLimits) -> tuple[list[Solution], float]:
        """The points with whole columns that are found, the best first, and a bound below all plans."""
        return self.linear.solve_integers([c for columns in self.stays for c in columns.values()], {}, effort)

    def held(self, solved: Solution, q: int) -> frozenset[str]:
        """The storages that are there when phase q begins."""
        there = (i for i, column in self.stays[q].items() if solved.values[column] > 0.5)
        return frozenset(self.program.storages[i].storage for i in (*there, *self.pieces.crumbs))

    def _stays(self, begin: int) -> Columns:
        """S_q; what may not run again and backward reads in this phase or later has to be there."""
        wanted, items, makers = self.pieces.wanted, self.program.storages, self.program.producers
        needed = {
            i
            for i in self.pieces.items
            if makers[items[i].producer].runs_once and (-1, *self.pieces.uses[i])[-1] >= begin
        }
        return {i: self.linear.add_column(least=float(i in needed)) for i in self.pieces.items if wanted[i] >= begin}

    def _again(self, begin: int) -> Columns:
        wanted, makers = self.pieces.wanted, self.program.producers
        again = (o for o, made in self.pieces.made.items() if any(wanted[i] >= begin for i in made))
        return {o: self.linear.add_column(makers[o].us) for o in again if not makers[o].runs_once}

    def _available(self, q: int) -> None:
        """Need, chain, carry and one form of every item."""
        row, again = self.linear.add_row, self.again[q]
        later = self.stays[q + 1] if q + 1 < len(self.stays) else {}
        for i, stays in self.stays[q].items():
            item = self.program.storages[i]
            there = {stays: 1.0} | ({again[item.producer]: 1.0} if item.producer in again else {})
            needed = any(self.begins[q] <= use <= self.ends[q] for use in self.pieces.uses[i])
            alone = len(self.pieces.made[item.producer]) == 1
            if needed or alone:
                row(float(needed), 1.0 if alone else INFINITY, there)
            for column in (*(again[w] for w in item.readers if w in again), *([later[i]] if i in later else [])):
                row(0.0, INFINITY, {**there, column: -1.0})

    def _tops(self) -> Iterator[int]:
        """The forward positions that are not below a neighbour."""
        base = self.program.fixed[: self.program.boundary]
        ends = np.concatenate(([-np.inf], base, [-np.inf]))
        tops = np.flatnonzero((base >= ends[:-2]) & (base >= ends[2:]))
        yield from sorted({*map(int, tops), self.program.boundary - 1} & set(range(self.program.boundary)))

    def _forward(self, position: int) -> None:
        items = self.program.storages
        lies = {
            column: items[i].nbytes / MIB for i, column in self.stays[0].items() if items[i].last_forward < position
        }
        self.linear.add_row(-INFINITY, float(self.budget - self.program.fixed[position]) / MIB, lies)

    def _cut(self, q: int) -> None:
        position, items = self.ends[q], self.program.storages
        read = self.program.read_at(position)
        lies = {column: items[i].nbytes / MIB for i, column in self.stays[q + 1].items() if i not in read}
        self.linear.add_row(-INFINITY, float(self.budget - self.program.in_use[position]) / MIB, lies)

    @cached_property
    def _pairs(self) -> Ints:
        """(s, p(s), z, w) of each z that is all w makes, which may run again and reads s."""
        items, made = self.program.storages, self.pieces.made
        found = [
            (i, items[i].producer, made[w][0], w)
            for i in self.pieces.items
            for w in items[i].readers
            if len(made.get(w, ())) == 1
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 4)

    def _spans(self, values: Floats) -> int:
        """Write, of each pair and each first phase, the span that is broken most; how many there are."""
        stays = _table(self.stays, len(self.program.storages), values)
        again = _table(self.again, len(self.program.producers), values)
        ran = np.concatenate((np.zeros((1, again.shape[1])), np.cumsum(again, axis=0)))
        s, p, z, w = self._pairs.T
        found = 0
        for a in range(len(self.ends) - 1):
            last = range(a + 1, len(self.ends))
            by = [stays[b, z] + again[b, w] - stays[a, z] - stays[a, s] - ran[b + 1, p] + ran[a, p] for b in last]
            worst = np.argmax(by, axis=0)
            for k in np.flatnonzero(np.max(by, axis=0) > BROKEN):
                self._span(self._pairs[k], a, a + 1 + int(worst[k]))
                found += 1
        return found

    def _span(self, pair: Ints, a: int, b: int) -> None:
        s, p, z, w = map(int, pair)
        there = {self.stays[a][s]: 1.0, self.stays[a][z]: 1.0, self.again[b][w]: -1.0}
        there |= {self.again[r][p]: 1.0 for r in range(a, b + 1) if p in self.again[r]}
        if z in self.stays[b]:
            there[self.stays[b][z]] = -1.0
        self.linear.add_row(0.0, INFINITY, there)


def _table(columns: list[Columns], count: int, values: Floats) -> Floats:
    """[q, index]: the value of each column, 0 where there is none."""
    found = np.zeros((len(columns), count))
    for q, known in enumerate(columns):
        found[q, list(known)] = values[list(known.values())]
    return found
