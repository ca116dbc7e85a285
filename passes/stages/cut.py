"""Cut a step into stages, so that the slowest is as fast as can be within the budget of each.

    four layers of 10, 10, 30 and 10 us, two stages    ->    the first two layers | the last two: 20 us, 40 us

A dynamic program over (stage, border): f[k][j] = min over i of max(f[k - 1][i], us of the stage k from i to j).  The
time of a stage that does not fit is at least that of recomputing or copying what does not: a fractional knapsack.
Where `plan` is given, the stages of the best cut are planned, their times put in, and the best cut is looked for again,
until it has been planned: then no cut is better.  Source of the recursion: AdaPipe (ASPLOS 2024).

Divide a row of times into consecutive parts, so that the slowest part is as fast as can be.

    5  3  4  2  6, three parts    ->    5 3 | 4 2 | 6: the slowest takes 8

f[k][j] = min over i of max(f[k - 1][i], sum of i to j).  The first term rises with i and the second falls, so the best
i is where they meet: it is found by bisection, for all j at once, in O(parts x length x log length).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..ir.arrays import Floats, Ints
from ..ir.errors import BudgetError
from .interval_costs import IntervalCosts

ROUNDS = 32  # cuts that are planned, at most
CLOSE = 1.02  # a planned cut is not improved any more if it is so near the bound


@dataclass(frozen=True)
class Stage:
    """The ops at places `begin` to `end`, as the stage with this number, whose forward is open so often."""

    number: int
    begin: int
    end: int
    forwards: int


@dataclass(frozen=True)
class Cut:
    """The stages of a step.

    Attributes:
        us: the time of each stage for one micro-batch.
        bound: no cut has a slowest stage that is faster.
    """

    stages: tuple[Stage, ...]
    us: tuple[float, ...]
    bound: float

    @property
    def slowest_us(self) -> float:
        return max(self.us)

    @property
    def balance(self) -> float:
        """Return the time of the slowest stage over the mean."""
        return self.slowest_us * len(self.us) / sum(self.us) if sum(self.us) else 1.0


PlanStage = Callable[[Stage], float]  # returns its time with a plan, and infinity if none fits


def best_cut(
    costs: IntervalCosts, budgets: Sequence[float], forwards: Sequence[int], plan: PlanStage | None = None,
    copy_us: float = math.inf, until: float = math.inf,
) -> Cut:  # fmt: skip
    """Return the cut into as many stages as there are budgets.

    Args:
        budgets: bytes of each stage.
        forwards: the forwards of each stage that are open at once.
        plan: the time of a planned stage, the same whenever it is asked. Without it, the times are lower bounds.
        copy_us: the least time that a plan takes to offload and reload a byte; infinite without a tier.
        until: when no stage is planned any more, as `time.monotonic` has it. Without a planned cut, the best one by the
            lower bounds is taken, which may not fit.

    Raises:
        ValueError: there are more stages than places to cut.
        BudgetError: no cut fits; it says which stage needs how much.
    """
    if len(budgets) > len(costs.borders) - 1:
        raise ValueError(
            f"{len(budgets)} stages are wanted, and the step can be cut into {len(costs.borders) - 1}: each stage has "
            "an op that computes, and no cut lies between the first use of a tensor and an op that writes to it, nor "
            "among uses of a module whose buffers forward updates; take fewer stages, or let the model clone what it "
            "writes to"
        )
    if plan is None and all(np.isposinf(budgets)):
        slowest, at = partition(costs.us[0], len(budgets))
        return Cut(_stages(costs, at, forwards), tuple(float(costs.us[i, j]) for i, j in pairwise(at)), slowest)
    us = all_bounds(costs, budgets, forwards, copy_us)
    best: Cut | None = None
    bound = math.inf
    for _ in range(ROUNDS if plan is not None else 1):
        bound, at = search(us)
        if not np.isfinite(bound):
            break
        cut = Cut(
            _stages(costs, at, forwards),
            tuple(float(t[i, j]) for t, (i, j) in zip(us, pairwise(at), strict=True)),
            bound,
        )
        if plan is not None and (best is None or time.monotonic() < until):
            pairs = zip(cut.stages, cut.us, strict=True)
            cut = replace(cut, us=tuple(plan(each) if time.monotonic() < until else least for each, least in pairs))
            _put_in(us, at, cut.us)
        if np.isfinite(cut.slowest_us) and (best is None or cut.slowest_us < best.slowest_us):
            best = cut
        if best is not None and (best.slowest_us <= bound * CLOSE or time.monotonic() >= until):
            break
    if best is None:
        raise _too_small(costs, budgets)
    return replace(best, bound=bound if np.isfinite(bound) else best.slowest_us)


def roomier_cut(
    costs: IntervalCosts, budgets: Sequence[float], forwards: Sequence[int], begins: Sequence[int],
    needed: Sequence[float],
) -> Cut | None:  # fmt: skip
    """Return the best cut among those that should fit, if what stages need besides their parameters is as in another
    cut; or else that in which they lack least. None if the parameters and gradients alone don't fit.

    Args:
        begins, needed: of the other cut, and what its stages need.
    """
    resident = costs.resident.astype(np.float64)
    if max(_lack(resident, budgets)[0]) > 0:
        return None
    at = [costs.borders.index(place) for place in (*begins, costs.borders[-1])]
    more = [nbytes - resident[i, j] for nbytes, (i, j) in zip(needed, pairwise(at), strict=True)]
    room = [budget - each for budget, each in zip(budgets, more, strict=True)]
    fitting = [np.where((resident <= each) & _valid(len(costs.borders)), costs.us, np.inf) for each in room]
    slowest, at = search(fitting)
    if not np.isfinite(slowest):
        _, at = _lack(resident, room)
    return Cut(_stages(costs, at, forwards), tuple(float(costs.us[i, j]) for i, j in pairwise(at)), slowest)


def balanced_cut(costs: IntervalCosts, begins: Sequence[int], forwards: Sequence[int]) -> Cut:
    """Return the cut whose stages begin at these places.

    Raises:
        ValueError: the places do not rise, or the step can't be cut there.
    """
    at = [costs.borders.index(place) if place in costs.borders else -1 for place in (*begins, costs.borders[-1])]
    if at[0] != 0 or any(i >= j for i, j in pairwise(at)):
        raise ValueError(
            f"stages can't begin at places {list(begins)}: the first begins at 0, and the others behind each other at "
            f"some of {_spans(costs.borders[1:-1])}"
        )
    us = tuple(float(costs.us[i, j]) for i, j in pairwise(at))
    return Cut(_stages(costs, at, forwards), us, max(us))


def _spans(places: Sequence[int]) -> str:
    """Write places, those in a row as one."""
    spans: list[list[int]] = []
    for place in places:
        if spans and spans[-1][-1] == place - 1:
            spans[-1].append(place)
        else:
            spans.append([place])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans) or "none"


def _stages(costs: IntervalCosts, at: Sequence[int], forwards: Sequence[int]) -> tuple[Stage, ...]:
    borders = [costs.borders[i] for i in at]
    return tuple(Stage(k, i, j, forwards[k]) for k, (i, j) in enumerate(pairwise(borders)))


def _put_in(us: list[Floats], at: Sequence[int], times: Sequence[float]) -> None:
    """Put in the times of planned stages. One that does not fit rules out all that contain it."""
    for k, ((i, j), planned) in enumerate(zip(pairwise(at), times, strict=True)):
        us[k] = us[k].copy()  # stages of equal bounds share an array
        if np.isfinite(planned):
            us[k][i, j] = planned
        else:
            us[k][: i + 1, j:] = np.inf


def all_bounds(costs: IntervalCosts, budgets: Sequence[float], forwards: Sequence[int], copy_us: float) -> list[Floats]:
    """Return [i, j) of each stage: a lower bound of its time within its budget; infinite where nothing fits."""
    us = np.where(_valid(len(costs.borders)), costs.us, np.inf)
    if all(np.isposinf(budgets)):
        return [us] * len(budgets)
    return [_bounds(costs, us, budget, count, copy_us) for budget, count in zip(budgets, forwards, strict=True)]


def _bounds(costs: IntervalCosts, us: Floats, budget: float, forwards: int, copy_us: float) -> Floats:
    us = np.where(costs.resident > budget, np.inf, us)
    excess = costs.resident + forwards * costs.saved - budget
    for i, j in np.argwhere((excess > 0) & np.isfinite(us)):
        us[i, j] += _freeing_us(costs, int(i), int(j), float(excess[i, j]) / forwards, copy_us)
    return us


def _freeing_us(costs: IntervalCosts, i: int, j: int, nbytes: float, copy_us: float) -> float:
    """Return the least time to recompute so many bytes, part of the last op, and to copy those that are recomputed
    slower than copied; infinite if there are fewer."""
    cells, sizes, times = costs.makers
    inside = (cells >= i) & (cells < j) & (times < copy_us * np.maximum(sizes, 1.0))
    sizes, times = sizes[inside], times[inside]
    total = np.cumsum(sizes)
    last = int(np.searchsorted(total, nbytes))
    if last >= len(total):
        left = nbytes - (total[-1] if len(total) else 0.0)
        return float(times.sum() + left * copy_us)
    before = total[last - 1] if last else 0.0
    return float(times[:last].sum() + times[last] * (nbytes - before) / max(sizes[last], 1.0))


def search(us: Sequence[Floats]) -> tuple[float, list[int]]:
    """Return the time of the slowest stage and the borders of the best cut; of equal ones, that of the least sum."""
    slowest, total = np.full(len(us[0]), np.inf), np.full(len(us[0]), np.inf)
    slowest[0] = total[0] = 0.0
    came: list[Ints] = []
    for times in us:
        reached = np.maximum(slowest[:, None], times)
        slowest = reached.min(axis=0)
        sums = np.where(reached <= slowest[None, :], total[:, None] + times, np.inf)
        came.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    at = [len(us[0]) - 1]
    for before in reversed(came):
        at.append(int(before[at[-1]]))
    return float(slowest[-1]), at[::-1]


def _too_small(costs: IntervalCosts, budgets: Sequence[float]) -> BudgetError:
    """Return the error that names the stage that lacks most, in the cut in which that is least."""
    lacks, at = _lack(costs.resident, budgets)
    k = max(range(len(budgets)), key=lacks.__getitem__)
    least = int(costs.resident[at[k], at[k + 1]])
    return BudgetError(
        f"no cut into {len(budgets)} stages keeps the budgets: stage {k} is allowed {int(budgets[k])} bytes, and its "
        f"parameters and gradients alone take {least}; give it more, or take more stages",
        int(budgets[k]),
        least,
    )


def _lack(resident: Ints | Floats, budgets: Sequence[float]) -> tuple[list[float], list[int]]:
    """Return the bytes that each stage lacks in the cut in which the most of these is least, and its borders."""
    lacks = [np.where(_valid(len(resident)), np.maximum(resident - budget, 0.0), np.inf) for budget in budgets]
    _, at = search(lacks)
    return [float(lack[i, j]) for lack, (i, j) in zip(lacks, pairwise(at), strict=True)], at


def _valid(borders: int) -> NDArray[np.bool_]:
    """Return [i, j): True if a stage may begin at i and end at j."""
    return np.arange(borders)[:, None] < np.arange(borders)[None, :]


def partition(before: Floats, parts: int) -> tuple[float, list[int]]:
    """Return the time of the slowest part, and where the parts begin and end; each has one entry at least.

    Args:
        before: the sum of the times before each entry, and of all of them at last.
    """
    size = len(before)
    slowest = before - before[0]  # with one part
    came: list[Ints] = []
    for part in range(1, parts):
        ends = np.arange(part + 1, size)
        at = _meeting(slowest, before, ends, part)
        reached = np.maximum(slowest[at], before[ends] - before[at])
        earlier = np.maximum(at - 1, part)
        sooner = np.maximum(slowest[earlier], before[ends] - before[earlier])
        came.append(np.zeros(size, np.int64))
        came[-1][ends] = np.where(sooner <= reached, earlier, at)
        slowest = np.full(size, np.inf)
        slowest[ends] = np.minimum(reached, sooner)
    borders = [size - 1]
    for at in reversed(came):
        borders.append(int(at[borders[-1]]))
    return float(slowest[-1]), [0, *borders[::-1]]


def _meeting(slowest: Floats, before: Floats, ends: Ints, first: int) -> Ints:
    """Return, for each end, the first border at which the parts before it are no faster than the last one."""
    low, high = np.full(len(ends), first), ends - 1
    while bool((low < high).any()):
        middle = (low + high) // 2
        is_slower = slowest[middle] >= before[ends] - before[middle]
        low, high = np.where(is_slower, low, middle + 1), np.where(is_slower, middle, high)
    return low
