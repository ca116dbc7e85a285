"""The linear program's least objective: a lower bound on the time that a plan adds, and a point to round.

    rows of 5 positions -> solve -> 11 positions are over the budget -> their rows -> solve -> ... -> none is

Rows are lazy: those of a position are written when the point that was found breaks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..ir.arrays import Floats
from . import memory_rows
from .model import PlanModel
from .occupancy import Occupancy
from .rows import MIB
from .solver import INFINITY, Solution

ROUNDS = 60
PER_ROUND = 12  # positions of each kind that get their rows
BANDS = 64  # of backward, in each of which the worst position is looked at
APART = 3  # positions nearer to each other than this say much the same
OVER = 1.001  # of the budget: what is less over it is left to the simulator

OverBudget = Callable[[PlanModel, Occupancy], list[int]]
Write = Callable[[PlanModel, int], None]


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A point below all plans of the class, None if there is none; the objective below all plans, however often they
    recompute; and whether more rows were written than there was work to solve."""

    solution: Solution | None
    any_us: float
    out_of_work: bool = False


def relax(model: PlanModel, work: float = INFINITY, rounds: int = ROUNDS) -> Relaxed | None:
    """The least point, or that after so many rounds of rows of backward or so much work; None if no plan at all fits
    the budget."""
    program = model.problem
    if program.floor.max(initial=0.0) > model.budget:
        return None
    first = {program.boundary - 1, *map(int, np.argsort(-program.fixed[: program.boundary])[:3])}
    for position in sorted(first & set(range(program.boundary))):
        write_rows(model, position)
    anyhow = converge(model, _any_over, write_any_plan_rows)
    if anyhow is None:
        return None
    for position in {program.boundary, *map(int, np.argsort(-program.fixed)[:3])} & set(_backward(model)):
        write_rows(model, position)
    solved, any_us = converge(model, over_budget, write_rows, work, rounds), max(0.0, anyhow.us - model.tie_us)
    ran_out = model.lp.out_of_work
    return Relaxed(solved or (anyhow if ran_out else None), any_us, ran_out)


def write_rows(model: PlanModel, position: int) -> None:
    """The rows of a position, if it has none."""
    if position in model.position_rows:
        return
    model.position_rows.add(position)
    (memory_rows.add_forward_row if position < model.problem.boundary else memory_rows.add_backward_rows)(
        model, position
    )


def write_any_plan_rows(model: PlanModel, position: int) -> None:
    """The rows of a position that hold of any plan, if it has none."""
    if position < model.problem.boundary:
        write_rows(model, position)
    elif position not in model.any_plan_rows:
        model.any_plan_rows.add(position)
        memory_rows.add_any_plan_row(model, position)


def _backward(model: PlanModel) -> range:
    return range(model.problem.boundary, model.problem.size)


def converge(
    model: PlanModel, over: OverBudget, write: Write, work: float = INFINITY, rounds: int = ROUNDS
) -> Solution | None:
    """Solve and write rows until no position that is looked at is over the budget; or so many times, or for so much
    work."""
    solved: Solution | None = None
    for left in reversed(range(rounds)):
        found = model.lp.solve(max(0.0, work - model.lp.relax_work))
        if found is None:
            return solved if model.lp.out_of_work else None
        solved = found
        new = over(model, Occupancy(model, solved.values)) if left else []
        if not new:
            break
        for position in new:
            write(model, position)
    return solved


def _any_over(model: PlanModel, occupancy: Occupancy) -> list[int]:
    """The worst positions of forward; and of backward by what any plan has there, if some of that may live far."""
    boundary = model.problem.boundary
    found = _worst(occupancy.kept_mib[:boundary], model.budget, model.position_rows)
    if model.state.offload:
        late = _worst(occupancy.any_plan_mib[boundary:], model.budget, {p - boundary for p in model.any_plan_rows})
        found += [boundary + position for position in late]
    return found


def over_budget(model: PlanModel, occupancy: Occupancy) -> list[int]:
    """The worst positions by what is kept, and in each band of backward by what is there with re-runs."""
    found = _worst(occupancy.kept_mib, model.budget, model.position_rows)
    bands = [band for band in np.array_split(np.array(_backward(model)), BANDS) if len(band)]
    positions = np.array([band[np.argmax(occupancy.kept_mib[band])] for band in bands], dtype=np.int64)
    worked = occupancy.with_reruns(positions)
    order = [k for k in np.argsort(-worked) if worked[k] * MIB > model.budget * OVER]
    return found + [int(positions[k]) for k in order if positions[k] not in model.position_rows][:PER_ROUND]


def _worst(nbytes: Floats, budget: int, written: set[int]) -> list[int]:
    found = [int(p) for p in np.argsort(-nbytes) if nbytes[p] * MIB > budget * OVER]
    return spread_out([position for position in found if position not in written], PER_ROUND)


def spread_out(positions: list[int], most: int) -> list[int]:
    """The first positions, without those that are near to one before them."""
    found: list[int] = []
    for position in positions:
        if len(found) < most and all(abs(position - other) > APART for other in found):
            found.append(position)
    return found
