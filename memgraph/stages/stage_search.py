"""The search for the plan of a stage, until a time.

time_limit=60, captured in 20 s    ->    20 s for the cut, then 10 s for each of two stages of this rank
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import passes
from passes import Machine, PlanResult, Trace, make_plan
from passes.lp.problem import proven_nbytes

from ..options.compile_options import planning_s

FITTING_S = 120.0  # of search beyond the default limit, while no plan fits
CUT_SHARE = 0.5  # of the time, to find the best cut


@dataclass(frozen=True)
class StageSearch:
    """Searches for a plan until a time.

    Attributes:
        until: in seconds of `time.monotonic`.
        is_bounded: False if a longer search is better than no plan, where the smallest plans do not fit.
    """

    until: float = math.inf
    is_bounded: bool = True

    @classmethod
    def beginning(cls, time_limit: float | None, begin: float) -> StageSearch:
        """Return the search after a capture, in a call that has begun then; a limit is one of the whole call."""
        now = time.monotonic()
        if time_limit is None:
            return cls(now + planning_s(None, now - begin), is_bounded=False)
        return cls(begin + time_limit)

    def shares(self, count: int) -> Iterator[StageSearch]:
        """Yield searches that come one after the other, with equal shares of what is left."""
        for i in range(count):
            yield self.of_share(1 / (count - i))

    def of_share(self, share: float) -> StageSearch:
        now = time.monotonic()
        return replace(self, until=now + share * max(0.0, self.until - now))

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.until

    @property
    def longer(self) -> StageSearch:
        """Return the search that goes on from now."""
        return StageSearch(time.monotonic() + FITTING_S)

    def __call__(self, trace: Trace, machine: Machine) -> PlanResult:
        """Return the best plan that is found.

        Raises:
            passes.BudgetError: none was found.
        """
        least = proven_nbytes(trace, machine)
        if least > machine.budget:
            raise passes.BudgetError(f"every plan needs {least} bytes", machine.budget, least)
        return make_plan(trace, machine, seconds=max(0.0, self.until - time.monotonic()))
