"""Checkmate: the least time that any recomputation adds to a step under a budget.

    checkmate(trace, 6108, seconds=60.0)     -> Optimum(us=5.0, bound_us=5.0, proven=True, reruns=((15, ("b",)),))

Backward is cut into stages, one an op.  Before its op a stage runs forward ops again: in forward's order, in `sweeps`
sweeps one behind the other.  (One is Checkmate; an order of re-runs that goes back takes one more each time it does.)

    R[q, k]      sweep q runs op k again                                               the only integers
    S[q, s]      storage s is present when sweep q begins, for a later use
    A[q, s][i]   it is present after its producer's turn in sweep q (i = 0), after the i-th reader's turn, for a later use
    H[q, k]      the generator's state with which k drew is wanted in sweep q or later

A storage is freed after its last use: A falls, in place of Checkmate's FREE.  Once all R are whole, the least S, A and H
are whole as well, as every row but those of memory says of one of them that it is not below another, or another less an R.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from passes import Op, Plan, Trace, apply

from .program import Program, Solution
from .step import Step

Reruns = tuple[tuple[int, tuple[str, ...]], ...]
Bytes = dict[int, int]


@dataclass(frozen=True, slots=True)
class Optimum:
    """The added microseconds (infinite if nothing fits or nothing was found), a lower bound of them, whether they are the
    least, and the re-runs: of each sweep the op before which it stands (by index) and the ops that it runs."""

    us: float
    bound_us: float
    proven: bool
    reruns: Reruns


def checkmate(trace: Trace, budget: int, seconds: float, sweeps: int = 1) -> Optimum:
    """The cheapest way to stay under `budget` by recomputing in backward, or the best that was found in `seconds`."""
    model = _Model(Step(trace), budget, sweeps)
    solution = model.write().solve(seconds)
    return Optimum(solution.cost, solution.bound, solution.proven, model.reruns(solution))


def sweeps_of(trace: Trace, plan: Plan) -> int:
    """The sweeps that `plan` needs in a stage at most."""
    step = Step(trace)
    most, count, last = 1, 1, -1
    for op in apply(trace, plan).ops:
        if op.recomputes in step.again:
            count += step.trace.index[op.recomputes] <= last
            most, last = max(most, count), step.trace.index[op.recomputes]
        elif step.trace.index.get(op.name) in step.wants:
            count, last = 1, -1
    return most


class _Model:
    """Writes the program.  A column that is not there is 0."""

    def __init__(self, step: Step, budget: int, sweeps: int) -> None:
        self.step, self.budget = step, budget
        self.unit = max(1.0, max(step.trace.nbytes.values(), default=0) / 10_000)  # bytes; keeps factors small
        self.program = Program()
        self.sweeps = [stage for stage in step.wants for _ in range(sweeps)]
        self.R: dict[tuple[int, str], int] = {}
        self.S: dict[tuple[int, str], int] = {}
        self.A: dict[tuple[int, str], list[int]] = {}
        self.H: dict[tuple[int, str], int] = {}
        self.turns: dict[tuple[int, str], list[int]] = {}  # the indices of the readers, beside A

    def write(self) -> Program:
        for q, stage in enumerate(self.sweeps):
            self._columns(q, stage)
        for q, s in self.S:
            self._presence(q, s)
        for q, name in self.R:
            self._memory_of_rerun(q, self.step.trace.op[name])
        for q, stage in enumerate(self.sweeps):
            if self._ends(q):
                there = {self.A[q, s][-1]: n for s, n in self._sizes(q).items()}
                self._fits(self.step.at(stage), there, self._states(q + 1))
        for i in range(self.step.trace.boundary):
            self._memory_of_forward(i)
        return self.program

    def reruns(self, solution: Solution) -> Reruns:
        """Return the ops that each sweep runs again."""
        ran: dict[int, list[str]] = {}
        for (q, name), column in self.R.items() if solution.values else ():
            if solution.values[column] > 0.5:
                ran.setdefault(q, []).append(name)
        return tuple((self.sweeps[q], tuple(names)) for q, names in ran.items())

    def _columns(self, q: int, stage: int) -> None:
        live = [s for s in self.step.producer if self.step.until[s] >= stage]
        for name, op in self.step.again.items():
            if any(made.name in live for made in op.makes):
                self.R[q, name] = self.program.column(op.us, integer=True)
                if op.draws:
                    self.H[q, name] = self.program.column()
        for s in live:
            self.S[q, s] = self.program.column(lower=stage in self.step.pinned[s])
            self.turns[q, s] = [self.step.trace.index[name] for name in self.step.readers[s] if (q, name) in self.R]
            wanted = self._ends(q) and s in self.step.wants[stage]
            self.A[q, s] = [self.program.column(lower=wanted) for _ in range(len(self.turns[q, s]) + 1)]

    def _presence(self, q: int, s: str) -> None:
        """Add rows: a storage that is read is present, and a present one was present before, or was just made."""
        there = self.A[q, s]
        self._at_most(there[0], self.S[q, s], self.R.get((q, self.step.producer[s])))
        for turn, earlier, later in zip(self.turns[q, s], there[:-1], there[1:], strict=True):
            self._at_most(later, earlier)
            self._at_most(self.R[q, self.step.trace.ops[turn].name], earlier)
        self._at_most(self.S.get((q + 1, s)), there[-1])

    def _memory_of_rerun(self, q: int, op: Op) -> None:
        """The bytes while `op` runs again; if it draws, also while the generator is set before and after it."""
        run, i, fixed = self.R[q, op.name], self.step.trace.index[op.name], self.step.before(self.sweeps[q])
        there = {self._there(q, s, i): n for s, n in self._sizes(q).items()}
        states = self._states(q, i)
        if not op.draws:
            return self._fits(fixed, there, states, {run: op.nbytes + op.workspace})
        again, later = self.H[q, op.name], self.H.get((q + 1, op.name))
        self._at_most(run, again)
        self._at_most(later, again)
        kept = {later: op.draws} if later is not None else {}
        own = {made.name for made in op.makes} if len(op.makes) > 1 else set()
        after = {self._there(q, s, i + (s not in own)): n for s, n in self._sizes(q).items()}
        self._fits(fixed, there, states, {run: 2 * op.draws})
        self._fits(fixed, there, states, kept, {run: op.nbytes + op.workspace + op.draws})
        # Of several results each is taken out behind that; until then all are there.
        self._fits(fixed, after, states, kept, {run: 2 * op.draws + op.nbytes * bool(own)})

    def _memory_of_forward(self, i: int) -> None:
        """Nothing is run again in forward: a storage is in use there, or it is kept for backward."""
        made = {s: n for s, n in self._sizes().items() if self.step.trace.index[self.step.producer[s]] <= i}
        used = sum(n for s, n in made.items() if i <= self.step.last_forward_use[s])
        kept = {self.S[0, s]: n for s, n in made.items() if i > self.step.last_forward_use[s] and (0, s) in self.S}
        states = {
            c: self.step.trace.op[k].draws for (q, k), c in self.H.items() if q == 0 and self.step.trace.index[k] <= i
        }
        self._fits(self.step.at(i) + used, kept, states)

    def _ends(self, q: int) -> bool:
        """Return True if sweep `q` is the last before the op of its stage."""
        return self.sweeps[q + 1 : q + 2] != [self.sweeps[q]]

    def _there(self, q: int, s: str, i: int) -> int:
        """Return the column of storage `s` being present at the turn of op `i` in sweep `q`, before the op's results."""
        if self.step.trace.index[self.step.producer[s]] >= i:
            return self.S[q, s]
        return self.A[q, s][bisect.bisect_left(self.turns[q, s], i)]

    def _states(self, q: int, i: int = 0) -> Bytes:
        """The generator's states that are there when op `i` has its turn in sweep `q`, without its own."""
        ops = [(name, op.draws, self.step.trace.index[name]) for name, op in self.step.again.items() if op.draws]
        found = {self.H.get((q + (index < i), name)): draws for name, draws, index in ops if index != i}
        return {column: draws for column, draws in found.items() if column is not None}

    def _sizes(self, q: int | None = None) -> dict[str, int]:
        """The bytes of the movable storages, or of those that can be wanted in sweep `q` or later."""
        return {s: self.step.trace.nbytes[s] for s in self.step.producer if q is None or (q, s) in self.S}

    def _at_most(self, low: int | None, *high: int | None) -> None:
        """`low` is not more than the sum of `high`."""
        if low is not None:
            self.program.row({low: 1.0} | {column: -1.0 for column in high if column is not None}, 0.0)

    def _fits(self, fixed: int, *parts: Bytes) -> None:
        """All this is at most the budget; bytes are whole, so half a byte more allows nothing and forgives rounding."""
        total: Bytes = {}
        for part in parts:
            for column, nbytes in part.items():
                total[column] = total.get(column, 0) + nbytes
        self.program.row({c: n / self.unit for c, n in total.items()}, (self.budget + 0.5 - fixed) / self.unit)
