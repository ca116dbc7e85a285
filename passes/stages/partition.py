"""Divide a row of times into consecutive parts, so that the slowest part is as fast as can be.

    5  3  4  2  6, three parts    ->    5 3 | 4 2 | 6: the slowest takes 8

f[k][j] = min over i of max(f[k - 1][i], sum of i to j).  The first term rises with i and the second falls, so the best
i is where they meet: it is found by bisection, for all j at once, in O(parts x length x log length).
"""

from __future__ import annotations

import numpy as np

from ..ir.arrays import Floats, Ints


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
