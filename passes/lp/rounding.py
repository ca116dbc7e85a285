"""From a point of the linear program to fates: the same program with whole columns, most of them fixed.

    K = (1, 0.37, 0, 0.99, ...)   ->   {a: KEEP, b: RECOMPUTE, c: RECOMPUTE, d: KEEP, h: OFFLOAD, ...}

The prices of the relaxed program say which columns it would cost more than a threshold to change; these stay as they
are, and what is left is small.  Below a threshold of minus infinity is no price: only the columns between their ends
are free then.
"""

from __future__ import annotations

from itertools import pairwise

from ..schedule.schedule import Placement
from .model import PlanModel
from .solver import SearchLimits, Solution

EDGE = 1e-7  # a column this near to one of its ends lies on it
HALF = 0.5
LEAST = 0.01  # of a column: what is less is not what a point leans to


def round_to_integers(
    model: PlanModel, relaxed: Solution, threshold: float, effort: SearchLimits, known: Solution | None = None
) -> tuple[list[Solution], float]:
    """The points with whole columns that are found with so much effort, the best first, and a bound below all of them.
    Columns that cost more than `threshold` microseconds to change stay as they are."""
    fixed = _fixed(model, relaxed, threshold)
    return model.lp.solve_integers(model.integer_columns, fixed, effort, known)


def placements(model: PlanModel, solved: Solution) -> dict[str, Placement]:
    """What becomes of each storage at a point with whole columns."""
    found: dict[str, Placement] = {}
    for i, item in enumerate(model.problem.storages):
        if i in model.offload and solved.values[model.offload[i]] > HALF:
            found[item.storage] = Placement.OFFLOAD
        elif i in model.cast_offload and solved.values[model.cast_offload[i]] > HALF:
            found[item.storage] = Placement.CAST_OFFLOAD
        elif solved.values[model.keep[i]] > HALF or model.problem.producers[item.producer].runs_once:
            found[item.storage] = Placement.KEEP
        else:
            found[item.storage] = Placement.RECOMPUTE
    for h, resident in enumerate(model.problem.states):
        if solved.values[model.state.offload[h]] > HALF:
            found[resident.storage] = Placement.STREAM if _is_streamed(model, solved, h) else Placement.OFFLOAD
    return found


def lp_preferences(model: PlanModel, solved: Solution) -> list[tuple[str, Placement]]:
    """What a point would have become of each storage that may leave, as far as it would: the most bytes first."""
    found: list[tuple[float, str, Placement]] = []
    for i in model.offload:
        item, columns = model.problem.storages[i], {Placement.KEEP: model.keep[i], Placement.OFFLOAD: model.offload[i]}
        if i in model.cast_offload:
            columns[Placement.CAST_OFFLOAD] = model.cast_offload[i]
        shares = {fate: solved.values[column] for fate, column in columns.items()}
        found += [(-share * item.nbytes, item.storage, fate) for fate, share in shares.items() if share > LEAST]
    for lives, resident in zip(model.state.offload, model.problem.states, strict=True):
        shares = {Placement.KEEP: 1.0 - solved.values[lives], Placement.OFFLOAD: solved.values[lives]}
        found += [(-share * resident.nbytes, resident.storage, fate) for fate, share in shares.items() if share > LEAST]
    return [(storage, fate) for _, storage, fate in sorted(found, key=lambda each: (each[0], each[1]))]


def _is_streamed(model: PlanModel, solved: Solution, h: int) -> bool:
    """Whether a resident is to go between two visits between which it would stay if time were all."""
    resident, begins = model.problem.states[h], model.problem.gaps.begins
    again = ((last, first) for (_, last), (first, _) in pairwise(resident.uses))
    us = resident.nbytes / model.problem.machine.link.back
    return any(
        begins[first] - begins[last] <= us and solved.values[model.state.stay[h, k]] < HALF
        for k, (last, first) in enumerate(again, 1)
    )


def _fixed(model: PlanModel, relaxed: Solution, threshold: float) -> dict[int, float]:
    """The columns, with their values, whose price says that they are right as they are."""
    fixed: dict[int, float] = {}
    for column in (*model.integer_columns, *model.recompute):
        least, most = model.lp.bounds[column]
        value, price = relaxed.values[column], relaxed.reduced_costs[column]
        if least < most and price > threshold and value < least + EDGE:
            fixed[column] = least
        elif least < most and price < -threshold and value > most - EDGE:
            fixed[column] = most
    return fixed
