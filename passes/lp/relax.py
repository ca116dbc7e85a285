"""Solve the linear program without whole numbers: a lower bound on the time that a plan adds, and a solution to round.

    rows of 5 positions -> solve -> 11 positions are over the budget -> their rows -> solve -> ... -> none is

Rows are lazy: a position gets its rows when a solution breaks them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np

from ..ir.arrays import Floats
from ..simulate.bound_proof import BoundProof
from .columns import MIB
from .linear_program import INFINITY
from .model import PlanModel
from .occupancy import Occupancy
from .solver import Solution

ROUNDS = 60
PER_ROUND = 12  # positions of each kind that get their rows in a round
BANDS = 64  # of backward: the worst position of each is looked at
APART = 3  # positions nearer to each other than this have nearly the same rows
OVER = 1.001  # of the budget: what is less over it is left to the simulator


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
