"""Better a plan that fits, one storage at a time: what is given up is kept, or given up in another way.

    {a: RECOMPUTE, b: OFFLOAD, c: OFFLOAD}   ->   {a: RECOMPUTE, b: RECOMPUTE, c: KEEP}, where c fits

Each try is simulated, so that what a search does not know is counted: copies that wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from .greedy import State, state_of
from .program import Item, Program
from .schedule import Fate


def polish(program: Program, state: State, tries: int, until: float) -> State:
    """The plan after so many tries, the largest storages first, or after those until `until`; see `time.monotonic`."""
    given = [item for item in program.items if state.fates.get(item.storage, Fate.KEEP) is not Fate.KEEP]
    for item in sorted(given, key=lambda item: (-item.nbytes, item.storage)):
        for fate in _ways(program, item):
            if tries <= 0 or time.monotonic() >= until:
                return state
            if state.fates[item.storage] is not fate:
                tries -= 1
                new = state_of(program.gaps, program.machine, state.fates | {item.storage: fate})
                if new.peak <= program.machine.budget and new.forecast.us < state.forecast.us:
                    state = new
    return state


def _ways(program: Program, item: Item) -> Iterator[Fate]:
    yield Fate.KEEP
    if not program.makers[item.maker].once:
        yield Fate.RECOMPUTE
    if item.leaves:
        yield Fate.OFFLOAD
    if item.wire:
        yield Fate.CAST_OFFLOAD
