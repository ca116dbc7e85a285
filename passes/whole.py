"""From a point of the linear program to fates: the same program with whole columns, most of them fixed.

    K = (1, 0.37, 0, 0.99, ...)   ->   {a: KEEP, b: RECOMPUTE, c: RECOMPUTE, d: KEEP, h: OFFLOAD, ...}

The prices of the relaxed program say which columns it would cost more than a threshold to change; these stay as they
are, and what is left is small.  Below a threshold of minus infinity is no price: only the columns between their ends
are free then.
"""

from __future__ import annotations

from dataclasses import dataclass

from .linear import Solved
from .model import Model
from .schedule import Fate

EDGE = 1e-7  # a column this near to one of its ends lies on it
HALF = 0.5


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to search: columns that cost more than `threshold` microseconds to change are fixed; `nodes` and `work`
    at most."""

    threshold: float
    nodes: int
    work: float


def whole(model: Model, relaxed: Solved, effort: Effort, target: float) -> tuple[Solved | None, float]:
    """A point with whole columns of at most `target`, if there is one that is easily found, or the best that is; and a
    bound below all such points that leave the fixed columns as they are."""
    fixed = _fixed(model, relaxed, effort.threshold)
    return model.linear.solve_whole(model.whole, fixed, effort.nodes, effort.work, target)


def fates(model: Model, solved: Solved) -> dict[str, Fate]:
    """What becomes of each storage at a point with whole columns."""
    found: dict[str, Fate] = {}
    for i, item in enumerate(model.program.items):
        if i in model.away and solved.values[model.away[i]] > HALF:
            found[item.storage] = Fate.OFFLOAD
        elif i in model.cast and solved.values[model.cast[i]] > HALF:
            found[item.storage] = Fate.CAST_OFFLOAD
        elif solved.values[model.kept[i]] > HALF or model.program.makers[item.maker].once:
            found[item.storage] = Fate.KEEP
        else:
            found[item.storage] = Fate.RECOMPUTE
    return found


def _fixed(model: Model, relaxed: Solved, threshold: float) -> dict[int, float]:
    """The columns, with their values, whose price says that they are right as they are."""
    fixed: dict[int, float] = {}
    for column in (*model.whole, *model.again):
        least, most = model.linear.bounds[column]
        value, price = relaxed.values[column], relaxed.prices[column]
        if least < most and price > threshold and value < least + EDGE:
            fixed[column] = least
        elif least < most and price < -threshold and value > most - EDGE:
            fixed[column] = most
    return fixed
