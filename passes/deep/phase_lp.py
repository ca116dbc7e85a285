"""The linear program of backward in phases: what is kept when each begins, and what is recomputed in it.

    before 1548:    a, c               keep[0, a] = keep[0, c] = 1
    1549 ... 2864:  b is recomputed    recompute[1, b] = 1, from a; then a is freed
    2865 ...:       b, c               keep[2, b] = keep[2, c] = 1

A plan for a deep budget recomputes a value several times.  So backward is cut into phases.  The program of `lp.model`
decides for each phase q, which ends with the op at end[q].  Names are those of `lp.model`, and:

    keep[q, s]        the storage is on the device when phase q begins
    recompute[q, o]   the op runs again in phase q, and its result was not there when the phase began

    minimise  sum us[o] recompute[q, o]

    needed         keep[q, s] + recompute[q, p(s)] >= 1, if backward reads s in q                _add_availability_rows
    chain          keep[q, s] + recompute[q, p(s)] >= recompute[q, w], w in readers(s)
    carry          keep[q, s] + recompute[q, p(s)] >= keep[q + 1, s]
    one form       keep[q, s] + recompute[q, p(s)] <= 1, if p(s) makes s alone
    span           keep[a, s] + sum recompute[a ... b, p(s)]                                     _add_broken_span_rows
                   >= keep[b, z] + recompute[b, w] - keep[a, z], z that w in readers(s) makes alone, a < b
    forward t      fixed[t] + sum bytes[s] keep[0, s] over last[s] < t <= budget                 _add_forward_row
    cut q          in_use[end[q]] + sum bytes[s] keep[q + 1, s] over s not read there <= budget  _add_cut_row

Every plan that recomputes in backward only, however often, satisfies all rows.  A recomputation of what is there, a
second one in a phase, and the bytes within a phase are left out.  So the least objective is a bound on the time that
any such plan adds, wherever backward is cut.  Without spans, half of a value could be recomputed in each of two phases,
from half of what it is made of.  Storages that together are 0.1 % of the budget take no bytes and are always kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..ir.arrays import Floats
from ..lp.columns import MIB
from ..lp.linear_program import INFINITY
from ..lp.problem import Ints, PlanProblem
from ..lp.solver import LPSolver, SearchLimits, Solution

NEGLIGIBLE = 0.001  # of the budget: storages that together are as small are always kept
ROUNDS = 10  # of spans
BROKEN = 0.05  # how much a span has to be broken to get its row
Columns = dict[int, int]


@dataclass(frozen=True, eq=False)
class PhaseProblem:
    """The storages of a problem that are not negligible, their producers, and until when each is needed."""

    problem: PlanProblem
    budget: int

    @cached_property
    def negligible(self) -> frozenset[int]:
        order = np.argsort(self.problem.nbytes, kind="stable")
        count = np.searchsorted(np.cumsum(self.problem.nbytes[order]), NEGLIGIBLE * self.budget, side="right")
        return frozenset(map(int, order[:count]))

    @cached_property
    def storages(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.problem.storages)) if i not in self.negligible)

    @cached_property
    def producers(self) -> dict[int, tuple[int, ...]]:
        """The storages of each producer that makes any."""
        storages = {
            o: tuple(i for i in each.storages if i not in self.negligible)
            for o, each in enumerate(self.problem.producers)
        }
        return {o: each for o, each in storages.items() if each}

    @cached_property
    def uses(self) -> dict[int, tuple[int, ...]]:
        """The backward positions that read each storage."""
        return {i: self.problem.gaps.uses.get(self.problem.storages[i].storage, ()) for i in self.storages}

    @cached_property
    def last_needs(self) -> dict[int, int]:
        """The last position before which each storage may be needed."""
        last: dict[int, int] = {}
        needs: dict[int, int] = {}
        for o in reversed(self.producers):
            for i in self.producers[o]:
                later = (last[w] for w in self.problem.storages[i].readers if w in last)
                needs[i] = max([-1, *self.uses[i][-1:], *later])
            if not self.problem.producers[o].runs_once:
                last[o] = max(needs[i] for i in self.producers[o])
        return needs


class PhaseModel:
    """The linear program of a problem, with backward cut behind some positions."""

    def __init__(self, pieces: PhaseProblem, budget: int, cuts: tuple[int, ...], until: float) -> None:
        program = pieces.problem
        self.phase_problem = pieces
        self.problem = program
        self.budget = budget
        self.lp = LPSolver(until)
        self.ends = (*cuts, program.size - 1)
        self.starts = (program.boundary, *(cut + 1 for cut in cuts))
        self.keep: list[Columns] = [self._keep_columns(begin) for begin in self.starts]
        self.recompute: list[Columns] = [self._recompute_columns(begin) for begin in self.starts]
        for q in range(len(self.ends)):
            self._add_availability_rows(q)
        for position in self._highest_forward_positions():
            self._add_forward_row(position)
        for q in range(len(cuts)):
            self._add_cut_row(q)

    def solve(self) -> Solution | None:
        """Solve, adding spans that are broken; return None if no plan at all fits the budget."""
        for _ in range(ROUNDS):
            solved = self.lp.solve()
            if solved is None or not self._add_broken_span_rows(solved.values):
                return solved
        return self.lp.solve()

    def solve_integers(self, effort: SearchLimits) -> tuple[list[Solution], float]:
        """Return the integer solutions that are found, the best first, and a bound below all plans."""
        return self.lp.solve_integers([c for columns in self.keep for c in columns.values()], {}, effort)

    def kept_storages(self, solved: Solution, q: int) -> frozenset[str]:
        """Return the storages that are kept when phase q begins."""
        there = (i for i, column in self.keep[q].items() if solved.values[column] > 0.5)
        return frozenset(self.problem.storages[i].storage for i in (*there, *self.phase_problem.negligible))

    def _keep_columns(self, begin: int) -> Columns:
        """Add `keep` of a phase; what can't be recomputed and is read in this phase or later has to be kept."""
        wanted, items, makers = self.phase_problem.last_needs, self.problem.storages, self.problem.producers
        needed = {
            i
            for i in self.phase_problem.storages
            if makers[items[i].producer].runs_once and (-1, *self.phase_problem.uses[i])[-1] >= begin
        }
        return {
            i: self.lp.add_column(least=float(i in needed)) for i in self.phase_problem.storages if wanted[i] >= begin
        }

    def _recompute_columns(self, begin: int) -> Columns:
        wanted, makers = self.phase_problem.last_needs, self.problem.producers
        again = (o for o, made in self.phase_problem.producers.items() if any(wanted[i] >= begin for i in made))
        return {o: self.lp.add_column(makers[o].us) for o in again if not makers[o].runs_once}

    def _add_availability_rows(self, q: int) -> None:
        row, again = self.lp.add_row, self.recompute[q]
        later = self.keep[q + 1] if q + 1 < len(self.keep) else {}
        for i, stays in self.keep[q].items():
            item = self.problem.storages[i]
            there = {stays: 1.0} | ({again[item.producer]: 1.0} if item.producer in again else {})
            needed = any(self.starts[q] <= use <= self.ends[q] for use in self.phase_problem.uses[i])
            alone = len(self.phase_problem.producers[item.producer]) == 1
            if needed or alone:
                row(float(needed), 1.0 if alone else INFINITY, there)
            for column in (*(again[w] for w in item.readers if w in again), *([later[i]] if i in later else [])):
                row(0.0, INFINITY, {**there, column: -1.0})

    def _highest_forward_positions(self) -> Iterator[int]:
        """Yield the forward positions that are not below a neighbour."""
        fixed = self.problem.fixed[: self.problem.boundary]
        ends = np.concatenate(([-np.inf], fixed, [-np.inf]))
        tops = np.flatnonzero((fixed >= ends[:-2]) & (fixed >= ends[2:]))
        yield from sorted({*map(int, tops), self.problem.boundary - 1} & set(range(self.problem.boundary)))

    def _add_forward_row(self, position: int) -> None:
        items = self.problem.storages
        lies = {column: items[i].nbytes / MIB for i, column in self.keep[0].items() if items[i].last_forward < position}
        self.lp.add_row(-INFINITY, float(self.budget - self.problem.fixed[position]) / MIB, lies)

    def _add_cut_row(self, q: int) -> None:
        position, items = self.ends[q], self.problem.storages
        read = self.problem.read_at(position)
        lies = {column: items[i].nbytes / MIB for i, column in self.keep[q + 1].items() if i not in read}
        self.lp.add_row(-INFINITY, float(self.budget - self.problem.in_use[position]) / MIB, lies)

    @cached_property
    def _pairs(self) -> Ints:
        """(s, p(s), z, w) of each storage z that a recomputable producer w makes alone and from s."""
        items, made = self.problem.storages, self.phase_problem.producers
        found = [
            (i, items[i].producer, made[w][0], w)
            for i in self.phase_problem.storages
            for w in items[i].readers
            if len(made.get(w, ())) == 1
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 4)

    def _add_broken_span_rows(self, values: Floats) -> int:
        """Add the span that is broken most, of each pair and each first phase; return their number."""
        stays = _table(self.keep, len(self.problem.storages), values)
        again = _table(self.recompute, len(self.problem.producers), values)
        ran = np.concatenate((np.zeros((1, again.shape[1])), np.cumsum(again, axis=0)))
        s, p, z, w = self._pairs.T
        found = 0
        for a in range(len(self.ends) - 1):
            last = range(a + 1, len(self.ends))
            by = [stays[b, z] + again[b, w] - stays[a, z] - stays[a, s] - ran[b + 1, p] + ran[a, p] for b in last]
            worst = np.argmax(by, axis=0)
            for k in np.flatnonzero(np.max(by, axis=0) > BROKEN):
                self._add_span_row(self._pairs[k], a, a + 1 + int(worst[k]))
                found += 1
        return found

    def _add_span_row(self, pair: Ints, a: int, b: int) -> None:
        s, p, z, w = map(int, pair)
        there = {self.keep[a][s]: 1.0, self.keep[a][z]: 1.0, self.recompute[b][w]: -1.0}
        there |= {self.recompute[r][p]: 1.0 for r in range(a, b + 1) if p in self.recompute[r]}
        if z in self.keep[b]:
            there[self.keep[b][z]] = -1.0
        self.lp.add_row(0.0, INFINITY, there)


def _table(columns: list[Columns], count: int, values: Floats) -> Floats:
    """Return the value of each column as [phase, index], 0 where there is none."""
    table = np.zeros((len(columns), count))
    for q, each in enumerate(columns):
        table[q, list(each)] = values[list(each.values())]
    return table
