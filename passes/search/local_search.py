"""Better a plan that fits, one storage at a time: another fate for it is taken, if the step is faster then and fits.

    {a: RECOMPUTE, b: OFFLOAD, c: OFFLOAD}   ->   {a: RECOMPUTE, b: RECOMPUTE, c: KEEP}, where c fits

First come the fates that the linear program's point leans to, as long as that helps; then what is given up is kept, or
given up in another way.  Each try is simulated, so that what a search does not know is counted: copies that wait for
each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from ..lp.problem import PlanProblem, StorageVar
from ..schedule.candidate import Candidate, make_candidate
from ..schedule.schedule import Placement

PlacementSwap = tuple[str, Placement]  # a storage, and what becomes of it


def local_search(
    program: PlanProblem, state: Candidate, tries: int, until: float, leaning: Sequence[PlacementSwap] = ()
) -> Candidate:
    """The plan after so many tries, or after those until `until`; see `time.monotonic`."""
    polished = _LocalSearch(program, state, tries, until)
    while leaning and polished.take(leaning):
        """What did not fit may fit now."""
    polished.take(_others(program, state))
    return polished.state


class _LocalSearch:
    """The best plan so far."""

    def __init__(self, program: PlanProblem, state: Candidate, tries: int, until: float) -> None:
        self.program, self.state, self.tries, self.until = program, state, tries, until
        self.failed: set[PlacementSwap] = set()  # tried with the state as it is, and no better

    def take(self, changes: Iterable[PlacementSwap]) -> bool:
        """Try them in their order; whether one was good."""
        before = self.state
        for storage, fate in changes:
            if self.tries <= 0 or time.monotonic() >= self.until:
                return False
            if self.state.placements.get(storage, Placement.KEEP) is not fate and (storage, fate) not in self.failed:
                self.tries -= 1
                self._try(storage, fate)
        return self.state is not before

    def _try(self, storage: str, fate: Placement) -> None:
        new = make_candidate(self.program.gaps, self.program.machine, self.state.placements | {storage: fate})
        if new.forecast.us < self.state.forecast.us and new.peak <= self.program.machine.budget:
            self.state = new
            self.failed.clear()
        else:
            self.failed.add((storage, fate))


def _others(program: PlanProblem, state: Candidate) -> Iterator[PlacementSwap]:
    """What else may become of the storages that are given up, the largest first."""
    given = [
        item for item in program.storages if state.placements.get(item.storage, Placement.KEEP) is not Placement.KEEP
    ]
    for item in sorted(given, key=lambda item: (-item.nbytes, item.storage)):
        for fate in _ways(program, item):
            yield item.storage, fate


def _ways(program: PlanProblem, item: StorageVar) -> Iterator[Placement]:
    yield Placement.KEEP
    if not program.producers[item.producer].runs_once:
        yield Placement.RECOMPUTE
    if item.can_offload:
        yield Placement.OFFLOAD
    if item.wire_nbytes:
        yield Placement.CAST_OFFLOAD
