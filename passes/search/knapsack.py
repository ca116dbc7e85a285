"""Choose values to keep: those that take the most time to recompute, within so many bytes.

sizes 3, 2, 2; times 5, 3, 3; room 4   ->   (1, 2), where the best by time over size first would be (0,)
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.arrays import Floats
from ..lp import solver
from ..lp.linear_program import INFINITY

WORK = 1e9  # simplex steps times rows; enough for thousands of values
NODES = 20_000


def most_time(sizes: Sequence[float], times: Sequence[float], room: float) -> tuple[int, ...]:
    """Return the places of values whose sizes are within `room` and whose times add up to the most.

    The choice is the best one, unless the search ends for lack of work, or HiGHS is not installed.
    """
    greedy = _by_ratio(sizes, times, room)
    if not solver.is_installed() or len(greedy) == len(sizes):
        return greedy
    found = _searched(sizes, times, room)
    return max((greedy, *found), key=lambda places: sum(times[place] for place in places))


def _by_ratio(sizes: Sequence[float], times: Sequence[float], room: float) -> tuple[int, ...]:
    """Return what fits of the values, those with the most time over size first."""
    kept, left = list[int](), room
    for place in sorted(range(len(sizes)), key=lambda i: -times[i] / sizes[i] if sizes[i] else -INFINITY):
        if sizes[place] <= left:
            kept.append(place)
            left -= sizes[place]
    return tuple(sorted(kept))


def _searched(sizes: Sequence[float], times: Sequence[float], room: float) -> list[tuple[int, ...]]:
    """Return the solutions of HiGHS that are within the room, which it may exceed by its tolerance."""
    program = solver.LPSolver()
    columns = [program.add_column(cost=-time) for time in times]
    scale = max(sizes)
    program.add_row(-INFINITY, room / scale, {i: size / scale for i, size in zip(columns, sizes, strict=True) if size})
    limits = solver.SearchLimits(target=-INFINITY, enough_bound=INFINITY, abs_gap=0.0, work=WORK, nodes=NODES)
    solutions, _ = program.solve_integers(columns, {}, limits)
    found = (_places(solution.values) for solution in solutions)
    return [places for places in found if sum(sizes[place] for place in places) <= room]


def _places(values: Floats) -> tuple[int, ...]:
    return tuple(place for place, value in enumerate(values) if value > 0.5)
