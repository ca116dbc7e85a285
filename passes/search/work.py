"""Limits of a search, in the work that `LPSolver` counts: the same on every machine.

1831 ops, a step of 6.7 s   ->   366 million in all, 61 million for one narrow search
"""

from __future__ import annotations

from dataclasses import dataclass

from ..lp.linear_program import INFINITY

WORK_PER_OP = 200_000  # of all searches of a pass
FEW = 1_000  # ops: as far as its time pays for it, a shorter step takes the work of so many, a longer one that of all
WORK_PER_US = 1_000  # of the step: what its searches take is then about 40 steps
REPAID = 50_000  # per microsecond that a step may gain: what it takes is then repaid in 2,000 to 4,000 steps
NARROW = 1 / 6  # of what the ops allow, for one search that a wider one follows: it mostly makes that superfluous
RELAXING = 4  # times the total, for solving rows of backward; beyond that, plans of the class are hardly found
# Shares of the total for solving rows of backward, where ops read offloaded state.  There they raise the bound by a
# thousandth and take most of the time.
PROVING = 1 / 4
AIMING = {True: 1 / 2, False: 1.0}  # where only a plan is sought, by whether activations may be offloaded


@dataclass(frozen=True)
class WorkLimits:
    """The work that a pass may take.

    Attributes:
        total: work of all its integer searches.
        narrow: work of one search that a wider one follows.
        relax: work of solving the relaxed program.
        repaid: work of the integer searches for each microsecond that a plan may be better than the best so far.
    """

    total: float
    narrow: float
    relax: float = INFINITY
    repaid: float = INFINITY

    @classmethod
    def for_step(cls, size: int, step_us: float, until: float = INFINITY) -> WorkLimits:
        """Return the limits for a step of so many ops.

        The first ops have their work in any case.  A loop over time has many more, which take hardly any time: then
        work beyond that is more than a plan can save.  Where someone waits, a search has to be repaid.
        """
        by_ops = WORK_PER_OP * max(FEW, size)
        total = max(WORK_PER_OP * min(FEW, size), min(by_ops, WORK_PER_US * step_us))
        return cls(total, NARROW * by_ops, repaid=INFINITY if until == INFINITY else REPAID)

    def left(self, taken: float, gain_us: float) -> float:
        """Return the work that is left for integer searches, where a plan may be so much better than the best."""
        return min(self.total, self.repaid * gain_us) - taken

    @property
    def smaller(self) -> WorkLimits:
        """The limits of a search beside the main one."""
        return WorkLimits(int(NARROW * self.total), NARROW * self.narrow, repaid=self.repaid)
