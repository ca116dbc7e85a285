"""Search for a plan alone where ops read offloaded state, as proofs take most of the work there.

293 million parameters beside a disk   ->   one program in which recomputations pay for the reloads that they need
                                            one in which besides only state is offloaded, so that the disk carries
                                            no activations; the better plan wins
"""

from __future__ import annotations

import time
from dataclasses import replace

from ..lp.linear_program import INFINITY
from ..schedule.candidate import Candidate
from .rounding_search import RepairLimits, RoundingSearch
from .work import AIMING, WorkLimits

ROUNDS = 2  # of rows of backward: solutions of more are rounded no better
REPAIR = RepairLimits(only_last=True, simulated=400_000)  # the greedy pass takes longer than all else


def plan_with_state(search: RoundingSearch, work: WorkLimits, threshold: float) -> Candidate | None:
    """Return the better plan of two searches that prove nothing; None if neither finds one.

    The better search goes on with columns free that cost less than `threshold` to change.  If neither has a plan, the
    greedy pass repairs what they have.
    """
    searches: list[RoundingSearch] = []
    for offloads_activations in (True, False):
        if time.monotonic() >= search.until or (searches and searches[0].incumbent.is_near()):
            break
        problem = replace(search.problem, offloads_activations=offloads_activations)
        limits = replace(work, relax=AIMING[offloads_activations] * work.total)
        other = RoundingSearch(problem, search.until, limits, REPAIR)
        if _aim(other):
            searches.append(other)
    planned = [(each.incumbent.rounded.forecast.us, i) for i, each in enumerate(searches) if each.incumbent.rounded]
    if planned:
        best = searches[min(planned)[1]]
        if not best.incumbent.is_near() and not best.model.lp.out_of_work:
            best.round(threshold, last=False)
        return best.incumbent.rounded
    for each in reversed(searches):
        each.round(-INFINITY, last=True)  # with repairs
        if each.incumbent.rounded:
            return each.incumbent.rounded
    return None


def _aim(search: RoundingSearch) -> bool:
    """Solve a program in few rounds, and round once; return True if it has a solution."""
    if not search.charge_reloads():
        return False
    relaxed = search.start(search.work.relax, ROUNDS)
    if relaxed is None or relaxed.out_of_work:
        return False
    search.round(-INFINITY, last=False)
    return True
