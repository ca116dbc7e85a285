"""No pipeline with one stage on each rank ends a mini-batch in less time than this.

    stage k, [i, j), m micro-batches     before it:  i's forward, and backward        m times its own, and waiting
    ->   us[0, i] + m us[i, j] + waiting;  the least over all cuts of the largest over their stages

Rank k can't begin before the stages before it have run one forward, and they have a backward to run when it has ended.
After its first forward it waits until the stages behind it have run forward and backward, and has no more than its open
forwards to run meanwhile; and so it does after its last forward, with their backwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..ir.arrays import Floats
from .cut import all_bounds, search
from .interval_costs import IntervalCosts


def least_makespan(
    costs: IntervalCosts, budgets: Sequence[float], forwards: Sequence[int], chunks: int, copy_us: float = math.inf
) -> float:
    """Return a lower bound of the time of a mini-batch, whatever the cut and the plans; infinite if nothing fits.

    Args:
        forwards: the most forwards of each stage that may be open.
        copy_us: the least time that a plan takes to offload and reload a byte; infinite without a tier.
    """
    planned = all_bounds(costs, budgets, forwards, copy_us)
    return search([_ends(costs, us, count, chunks) for us, count in zip(planned, forwards, strict=True)])[0]


def _ends(costs: IntervalCosts, planned: Floats, forwards: int, chunks: int) -> Floats:
    """Return [i, j): when a mini-batch ends at the earliest, with this stage.

    Args:
        planned: a lower bound of its time for one micro-batch, with what it recomputes and copies.
    """
    behind = costs.us[:, -1][None, :]
    first = np.maximum(0.0, behind - (forwards - 1) * costs.forward_us)
    last = np.maximum(0.0, behind - (forwards - 1) * costs.backward_us)
    waiting = first + last if chunks > forwards else np.maximum(first, last)
    before = costs.us[0, :][:, None]
    # Recomputation and copies may fill the waiting.
    return before + np.maximum(chunks * planned, np.where(np.isfinite(planned), chunks * costs.us + waiting, np.inf))
