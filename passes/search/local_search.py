"""Improve a plan that fits, one storage at a time: change its placement, if the step is faster then and still fits.

    {a: RECOMPUTE, b: OFFLOAD, c: OFFLOAD}   ->   {a: RECOMPUTE, b: RECOMPUTE, c: KEEP}, where c fits

First come the placements that the linear program leans to, as long as that helps.  Then what is not kept
is kept, or placed otherwise.  Each try is simulated, which counts what the program does not: copies that wait for each
other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from ..lp.problem import PlanProblem, StorageVar
from ..schedule.candidate import Candidate, make_candidate
from ..schedule.schedule import Placement

PlacementSwap = tuple[str, Placement]  # a storage, and its new placement


def local_search(
    problem: PlanProblem, start: Candidate, tries: int, until: float, preferences: Sequence[PlacementSwap] = ()
) -> Candidate:
    """Return the plan after so many tries, or after those before `until`, as `time.monotonic` has it."""
    search = _LocalSearch(problem, start, tries, until)
    while preferences and search.take(preferences):
        """What did not fit may fit now."""
    search.take(_swaps(problem, start))
    return search.candidate


class _LocalSearch:
    """The best plan so far, and the swaps that failed since it was found."""

    def __init__(self, problem: PlanProblem, start: Candidate, tries: int, until: float) -> None:
        self.problem, self.candidate, self.tries, self.until = problem, start, tries, until
        self.failed: set[PlacementSwap] = set()

    def take(self, swaps: Iterable[PlacementSwap]) -> bool:
        """Try swaps in their order; return True if one helped."""
        before = self.candidate
        for storage, placement in swaps:
            if self.tries <= 0 or time.monotonic() >= self.until:
                return False
            is_new = self.candidate.placements.get(storage, Placement.KEEP) is not placement
            if is_new and (storage, placement) not in self.failed:
                self.tries -= 1
                self._try(storage, placement)
        return self.candidate is not before

    def _try(self, storage: str, placement: Placement) -> None:
        machine = self.problem.machine
        new = make_candidate(self.problem.gaps, machine, self.candidate.placements | {storage: placement})
        if new.forecast.us < self.candidate.forecast.us and new.peak <= machine.budget:
            self.candidate = new
            self.failed.clear()
        else:
            self.failed.add((storage, placement))


def _swaps(problem: PlanProblem, candidate: Candidate) -> Iterator[PlacementSwap]:
    """Yield the other placements of the storages that are not kept, the largest first."""
    placements = candidate.placements
    movable = [each for each in problem.storages if placements.get(each.storage, Placement.KEEP) is not Placement.KEEP]
    for each in sorted(movable, key=lambda each: (-each.nbytes, each.storage)):
        for placement in _placements(problem, each):
            yield each.storage, placement


def _placements(problem: PlanProblem, storage: StorageVar) -> Iterator[Placement]:
    yield Placement.KEEP
    if not problem.producers[storage.producer].runs_once:
        yield Placement.RECOMPUTE
    if storage.can_offload:
        yield Placement.OFFLOAD
    if storage.wire_nbytes:
        yield Placement.CAST_OFFLOAD
