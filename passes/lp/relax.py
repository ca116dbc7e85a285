"""Solve the linear program without whole numbers: a lower bound on the time that a plan adds, and a solution to round.

    rows of 5 positions -> solve -> 11 positions are over the budget -> their rows -> solve -> ... -> none is

Rows are lazy: a position gets its rows when a solution breaks them.

Count the bytes that a solution of the linear program has at every position, with rows there or not.

keep = (1, 0, 0.5, ...)   ->   kept_mib: [18.2, 18.9, ...];  with_reruns(positions): recomputed storages as well
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..ir.arrays import Floats
from ..simulate.bound_proof import BoundProof
from .bandwidth_rows import Curve, LinkRows
from .columns import MIB, Columns
from .linear_program import INFINITY
from .memory_rows import first_need
from .model import PlanModel
from .problem import Ints, PlanProblem, StorageVar
from .solver import Solution
from .state_vars import StateVar

ROUNDS = 60
PER_ROUND = 12  # positions of each kind that get their rows in a round
BANDS = 64  # of backward: the worst position of each is looked at
APART = 3  # positions nearer to each other than this have nearly the same rows
OVER = 1.001  # of the budget: what is less over it is left to the simulator
NEGLIGIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The result of solving without whole numbers.

    Attributes:
        solution: at most as slow as any plan that recomputes and reloads once; None if there is no such plan.
        any_us: a bound on the time that any plan adds.
        proof, any_proof: dual values that prove the objective of `solution`, and `any_us`.
        out_of_work: True if rows are left that there was no work to solve.
    """

    solution: Solution | None
    any_us: float
    proof: BoundProof | None
    any_proof: BoundProof | None
    out_of_work: bool = False


def relax(model: PlanModel, work: float = INFINITY, rounds: int = ROUNDS) -> Relaxed | None:
    """Solve a model, adding rows until none is broken, for so many rounds and so much work in backward.

    Returns None if no plan at all fits the budget.
    """
    problem = model.problem
    if problem.least_nbytes > model.budget:
        return None
    first = {problem.boundary - 1, *map(int, np.argsort(-problem.fixed[: problem.boundary])[:3])}
    for position in sorted(first & set(range(problem.boundary))):
        model.add_rows(position)
    any_plan, any_proof = _converge(model, _any_plan_over_budget, model.add_rows_of_any_plan)
    if any_plan is None:
        return None
    for position in {problem.boundary, *map(int, np.argsort(-problem.fixed)[:3])} & set(_backward(model)):
        model.add_rows(position)
    solution, proof = _converge(model, _over_budget, model.add_rows, work, rounds)
    any_us, out_of_work = max(0.0, any_plan.us - model.columns.tie_us), model.lp.out_of_work
    if solution is None and out_of_work:
        solution, proof = any_plan, any_proof
    return Relaxed(solution, any_us, proof, any_proof, out_of_work)


def spread_out(positions: list[int], most: int) -> list[int]:
    """Return the first positions, without those near to an earlier one."""
    chosen: list[int] = []
    for position in positions:
        if len(chosen) < most and all(abs(position - other) > APART for other in chosen):
            chosen.append(position)
    return chosen


def _converge(
    model: PlanModel,
    over_budget: Callable[[PlanModel, Occupancy], list[int]],
    add_rows: Callable[[int], None],
    work: float = INFINITY,
    rounds: int = ROUNDS,
) -> tuple[Solution | None, BoundProof | None]:
    """Solve and add rows until no position is over the budget, or rounds or work have run out.

    Returns the last solution, and its dual values as a proof of its objective.
    """
    best: Solution | None = None
    added = 0  # rows that the program of `best` had
    for left in reversed(range(rounds)):
        solution = model.lp.solve(max(0.0, work - model.lp.relax_work))
        if solution is None:
            best = best if model.lp.out_of_work else None
            break
        best, added = solution, len(model.rows.added)
        new = over_budget(model, Occupancy(model, best.values)) if left else []
        if not new:
            break
        for position in new:
            add_rows(position)
    return best, None if best is None else BoundProof.of(model.rows.added[:added], best.duals)


def _any_plan_over_budget(model: PlanModel, occupancy: Occupancy) -> list[int]:
    """Return the worst positions of forward; and of backward, as any plan has them, if state may be offloaded."""
    boundary, memory = model.problem.boundary, model.memory
    worst = _worst(occupancy.kept_mib[:boundary], model.budget, memory.positions)
    if model.columns.state.offload:
        written = {position - boundary for position in memory.any_plan_positions}
        backward = _worst(occupancy.any_plan_mib[boundary:], model.budget, written)
        worst += [boundary + position for position in backward]
    return worst


def _over_budget(model: PlanModel, occupancy: Occupancy) -> list[int]:
    """Return the worst positions without recomputed storages, and those with them in each band of backward."""
    written = model.memory.positions
    worst = _worst(occupancy.kept_mib, model.budget, written)
    bands = [band for band in np.array_split(np.array(_backward(model)), BANDS) if len(band)]
    positions = np.array([band[np.argmax(occupancy.kept_mib[band])] for band in bands], dtype=np.int64)
    mib = occupancy.with_reruns(positions)
    order = [k for k in np.argsort(-mib) if mib[k] * MIB > model.budget * OVER]
    return worst + [int(positions[k]) for k in order if positions[k] not in written][:PER_ROUND]


def _worst(mib: Floats, budget: int, written: Container[int]) -> list[int]:
    worst = [int(p) for p in np.argsort(-mib) if mib[p] * MIB > budget * OVER]
    return spread_out([position for position in worst if position not in written], PER_ROUND)


def _backward(model: PlanModel) -> range:
    return range(model.problem.boundary, model.problem.size)


@dataclass(frozen=True, eq=False)
class Occupancy:
    """The bytes of a solution, in MiB."""

    model: PlanModel
    values: Floats

    @property
    def problem(self) -> PlanProblem:
        return self.model.problem

    @property
    def columns(self) -> Columns:
        return self.model.columns

    @cached_property
    def kept_mib(self) -> Floats:
        """MiB at every position, without recomputed storages that wait for their use."""
        problem = self.problem
        until = np.where(problem.first_backward < problem.size, problem.first_backward, problem.boundary)
        kept = self._sum(problem.last_forward + 1, until, problem.nbytes * self.keep / MIB)
        return kept + self._rng_states() + problem.fixed / MIB + self.copies_mib

    @property
    def any_plan_mib(self) -> Floats:
        """MiB at every position in any plan, if backward keeps only what it uses."""
        return self.problem.in_use / MIB + self.copies_mib

    def with_reruns(self, positions: Ints) -> Floats:
        """Return the MiB at some backward positions, with recomputed storages."""
        reran = self._reran(positions)
        extra = np.zeros(len(positions))
        for i, storage in enumerate(self.problem.storages):
            present = self._present if storage.first_backward < self.problem.size else self._present_for_reruns
            extra += storage.nbytes / MIB * present(i, storage, reran, positions)
        return self.kept_mib[positions] + extra

    @cached_property
    def keep(self) -> Floats:
        return self.values[self.columns.keep]

    @cached_property
    def recompute(self) -> Floats:
        return self.values[self.columns.recompute]

    @cached_property
    def offload(self) -> Floats:
        """The share of each storage that is offloaded, cast or not."""
        shares = np.zeros(len(self.keep))
        for i in self.columns.offload:
            shares[i] = sum(self.values[column] for column in self.columns.copied_mib(i))
        return shares

    @cached_property
    def copied_mib(self) -> Floats:
        """The MiB of each storage that are copied each way."""
        copied = np.zeros(len(self.keep))
        for i in self.columns.offload:
            copied[i] = sum(self.values[column] * mib for column, mib in self.columns.copied_mib(i).items())
        return copied

    def _sum(self, first: Ints, last: Ints, mib: Floats) -> Floats:
        """Sum storages at every position, each from `first` to before `last`."""
        change = np.zeros(self.problem.size + 1)
        np.add.at(change, first, mib)
        np.add.at(change, np.maximum(first, last), -mib)
        return np.cumsum(change)[:-1]

    def _rng_states(self) -> Floats:
        """Sum the generator states that wait in forward for a recomputation."""
        change = np.zeros(self.problem.size + 1)
        for o, nbytes, first in self.problem.rng_draws:
            change[first] += nbytes / MIB * self.recompute[o]
            change[self.problem.boundary] -= nbytes / MIB * self.recompute[o]
        states: Floats = np.cumsum(change)[:-1]
        return states

    @cached_property
    def copies_mib(self) -> Floats:
        """Sum what has not left yet, what is back early, what offloaded state changes, and staging."""
        problem, links, staging = self.problem, self.model.links, self.columns.staging
        if links is None or staging is None:
            return np.zeros(problem.size)
        boundary, count = problem.boundary, len(self.offload)
        end = np.full(count, problem.size)
        mib = self._sum(problem.last_forward + 1, end, self.copied_mib)
        mib[:boundary] -= self._carried(links.out)[:boundary]
        start = np.array([first_need(problem, i) for i in range(count)], dtype=np.int64)
        used = self._sum(start, end, self.copied_mib) + self._reloaded()
        mib[boundary:] = np.maximum(self._carried(links.back, 1) - used, 0.0)[boundary:]
        mib[:boundary] += np.maximum(self._carried(links.forward_back, 1) - self._reloaded(), 0.0)[:boundary]
        mib += self._state(links)
        return mib + problem.machine.link.staging / MIB * float(self.values[staging])

    def _carried(self, curve: Curve, before: int = 0) -> Floats:
        """Return a curve at every position: at the end of its stage, or so many stages before."""
        if not curve.carried:
            return np.zeros(self.problem.size)
        j = np.searchsorted(curve.begins, np.arange(self.problem.size), side="right") - 1 - before
        return np.where(j >= 0, self.values[[*curve.carried]][np.maximum(j, 0)], 0.0)

    def _reloaded(self) -> Floats:
        """Sum the state that has been reloaded by every position at the latest."""
        change = np.zeros(self.problem.size)
        for state, offload, stay in self._offloaded_states():
            for k, (first, _) in enumerate(state.uses if not state.is_gradient else ()):
                change[first] += state.nbytes / MIB * (offload - stay.get(k, 0.0))
        return np.cumsum(change)

    def _state(self, links: LinkRows) -> Floats:
        """Sum what offloaded state frees, and what its updates take."""
        problem, state = self.problem, self.columns.state
        change, complete = np.zeros(problem.size + 1), np.zeros(problem.size + 1)
        for each, offload, stay in self._offloaded_states():
            for gap in each.gaps(problem.size):
                mib = each.nbytes / MIB * (offload - stay.get(gap.next_use, 0.0))
                if each.is_gradient:
                    complete[gap.first] += mib
                else:
                    change[gap.first] -= mib
                    change[gap.last] += mib
        left = np.minimum(np.cumsum(complete)[:-1], self._carried(links.backward_out))
        total: Floats = np.cumsum(change)[:-1] - left
        streaming = problem.machine.streaming
        for position, windowed in state.windowed.items():
            workspace = problem.gaps.trace.ops[position].workspace
            total[position] += (streaming.window - workspace) / MIB * self.values[windowed]
        for before, after in pairwise([*state.staged, problem.size]):
            total[before + 1 : after] += streaming.update_staging / MIB * self.values[state.staged[before]]
        return total

    def _offloaded_states(self) -> Iterator[tuple[StateVar, float, dict[int | None, float]]]:
        """Yield each state that is offloaded in part, that share, and the share that stays before each use."""
        columns = self.columns.state
        for r, state in enumerate(self.problem.states):
            if (offload := float(self.values[columns.offload[r]])) > NEGLIGIBLE:
                uses = range(1, len(state.uses))
                yield state, offload, {k: float(self.values[columns.stay[r, k]]) for k in uses}

    def _reran(self, positions: Ints) -> Floats:
        """Return how much of each producer has been recomputed by each position."""
        problem = self.problem
        saved = self.keep + self.offload
        reran = np.zeros((len(problem.producers), len(positions)))
        for o in reversed(range(len(problem.producers))):
            if self.recompute[o] < NEGLIGIBLE:
                continue
            produced, least = problem.producers[o].storages, np.zeros(len(positions))
            for i in produced:
                storage = problem.storages[i]
                if storage.first_backward < problem.size:
                    needed = self.recompute[o] if len(produced) == 1 else 1.0 - saved[i]
                    least = np.maximum(least, np.where(storage.first_backward <= positions, needed, 0.0))
                for w in storage.readers:
                    if self.recompute[w] >= NEGLIGIBLE:
                        least = np.maximum(least, reran[w] - saved[i])
            reran[o] = np.minimum(least, self.recompute[o])
        return reran

    def _present(self, i: int, storage: StorageVar, reran: Floats, positions: Ints) -> Floats:
        if self.problem.producers[storage.producer].makes_one:
            present = self.keep[i] + reran[storage.producer]
        else:
            present = np.maximum(self.keep[i], reran[storage.producer] - self.offload[i])
        for w in storage.readers:
            present = np.maximum(present, reran[w])
        in_gap = (storage.last_forward < positions) & (storage.first_backward > positions)
        return np.where(in_gap, present - self.keep[i], 0.0)

    def _present_for_reruns(self, i: int, storage: StorageVar, reran: Floats, positions: Ints) -> Floats:
        present, recomputed = np.zeros(len(positions)), reran[storage.producer]
        makes_one = self.problem.producers[storage.producer].makes_one
        most = self.keep[i] + recomputed if makes_one else np.maximum(self.keep[i], recomputed)
        for w in storage.readers:
            present = np.maximum(present, np.minimum(most, self.recompute[w]) - reran[w])
        return present
