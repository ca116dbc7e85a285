"""Round a solution of the linear program: solve it with whole numbers, most of them fixed.

    keep = (1, 0.37, 0, 0.99, ...)   ->   {a: KEEP, b: RECOMPUTE, c: RECOMPUTE, d: KEEP, h: OFFLOAD, ...}

The reduced costs of the relaxed program say which columns it would cost more than a threshold to change.  These stay as
they are, so that few are left to search.  Below a threshold of minus infinity is no reduced cost: then only the columns
between their ends are free.
"""

from __future__ import annotations

from itertools import pairwise

from ..schedule.schedule import Placement
from .model import PlanModel
from .solver import SearchLimits, Solution

EDGE = 1e-7  # a column this near to one of its ends is at it
HALF = 0.5
LEAST = 0.01  # of a column: smaller shares are no preference


def round_to_integers(
    model: PlanModel, relaxed: Solution, threshold: float, limits: SearchLimits, start: Solution | None = None
) -> tuple[list[Solution], float]:
    """Search the integer solutions that change no column for which that costs more than `threshold` microseconds.

    Returns those that were found, the best first, and a bound below all of them.
    """
    return model.lp.solve_integers(model.columns.integers, _fixed(model, relaxed, threshold), limits, start)


def placements(model: PlanModel, solution: Solution) -> dict[str, Placement]:
    """Return the placement of each storage and state in an integer solution."""
    columns, values, chosen = model.columns, solution.values, dict[str, Placement]()
    for i, storage in enumerate(model.problem.storages):
        if i in columns.offload and values[columns.offload[i]] > HALF:
            chosen[storage.storage] = Placement.OFFLOAD
        elif i in columns.cast_offload and values[columns.cast_offload[i]] > HALF:
            chosen[storage.storage] = Placement.CAST_OFFLOAD
        elif values[columns.keep[i]] > HALF or model.problem.producers[storage.producer].runs_once:
            chosen[storage.storage] = Placement.KEEP
        else:
            chosen[storage.storage] = Placement.RECOMPUTE
    for r, state in enumerate(model.problem.states):
        if values[columns.state.offload[r]] > HALF:
            chosen[state.storage] = Placement.STREAM if _is_streamed(model, solution, r) else Placement.OFFLOAD
    return chosen


def lp_preferences(model: PlanModel, solution: Solution) -> list[tuple[str, Placement]]:
    """Return the placements that a solution leans to, of what may be offloaded: the most bytes first."""
    columns, values, preferences = model.columns, solution.values, list[tuple[float, str, Placement]]()

    def add(storage: str, nbytes: int, shares: dict[Placement, float]) -> None:
        preferences.extend(
            (-share * nbytes, storage, placement) for placement, share in shares.items() if share > LEAST
        )

    for i in columns.offload:
        storage = model.problem.storages[i]
        ways = {Placement.KEEP: columns.keep[i], Placement.OFFLOAD: columns.offload[i]}
        if i in columns.cast_offload:
            ways[Placement.CAST_OFFLOAD] = columns.cast_offload[i]
        add(storage.storage, storage.nbytes, {placement: values[column] for placement, column in ways.items()})
    for offload, state in zip(columns.state.offload, model.problem.states, strict=True):
        share = values[offload]
        add(state.storage, state.nbytes, {Placement.KEEP: 1.0 - share, Placement.OFFLOAD: share})
    return [(storage, placement) for _, storage, placement in sorted(preferences, key=lambda each: (each[0], each[1]))]


def _is_streamed(model: PlanModel, solution: Solution, r: int) -> bool:
    """Return True if a state is to leave between two uses that follow faster than a reload takes."""
    state, begins = model.problem.states[r], model.problem.gaps.begins
    between = ((last, first) for (_, last), (first, _) in pairwise(state.uses))
    us = state.nbytes / model.problem.machine.link.back
    return any(
        begins[first] - begins[last] <= us and solution.values[model.columns.state.stay[r, k]] < HALF
        for k, (last, first) in enumerate(between, 1)
    )


def _fixed(model: PlanModel, relaxed: Solution, threshold: float) -> dict[int, float]:
    """Return the columns that stay at one of their ends, with their values."""
    fixed: dict[int, float] = {}
    for column in (*model.columns.integers, *model.columns.recompute):
        least, most = model.lp.bounds[column]
        value, reduced_cost = relaxed.values[column], relaxed.reduced_costs[column]
        if least < most and reduced_cost > threshold and value < least + EDGE:
            fixed[column] = least
        elif least < most and reduced_cost < -threshold and value > most - EDGE:
            fixed[column] = most
    return fixed
