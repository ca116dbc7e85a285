"""What the searches of a pass may take, in the work that `LPSolver` counts: the same on every machine.

    1831 ops, a step of 6.7 s   ->   366 million in all, 61 million for one narrow search

A step that takes long pays for being searched; one of few ops is searched no longer than it pays.
"""

from __future__ import annotations

WORK_PER_OP = 200_000  # of all searches of a pass together; see `LPSolver.work`
FEW = 1_000  # ops: with fewer a search takes no less, as far as the step pays it
WORK_PER_US = 1_000  # of the step: with that, what its searches take is about that of 40 steps
NARROW = 1 / 6  # of what the ops give, for one search, if a wider one follows: it mostly spares that
# Where state is fetched, shares of all that searches may take, for solving rows of backward: which raise what is proven
# by a thousandth there, and take most of the time; and for that where a plan alone is sought, with trips of values
# and without, which takes a third as long.
PROVING = 1 / 4
AIMING = {True: 1 / 2, False: 1.0}


def work_for(size: int, step_us: float) -> float:
    """What all searches of a pass together may take: by the ops of the step, and if they are few by its time."""
    return max(WORK_PER_OP * size, min(work_of_ops(size), WORK_PER_US * step_us))


def work_of_ops(size: int) -> float:
    """The same by the ops of the step alone, as if its time paid whatever it takes."""
    return WORK_PER_OP * max(FEW, size)
