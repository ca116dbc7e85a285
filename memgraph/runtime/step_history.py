"""The times of the latest steps, compared with their forecast: they decide when to plan again.

    20 steps of 110 ms at the median, forecast 98 ms     ->   the report says 12 % more than forecast
    ... and 97 ms when the step was last planned         ->   plan again, if that may pay

Only whole steps are timed here, which takes microseconds.  Ops are timed in the step before a new plan.
"""

from __future__ import annotations

import statistics
from collections import deque

from passes import Forecast

from ..profile.step_timer import WallTimes
from ..report.step_times import FEW, LENGTH, is_off
from ..system import reference_op

LOOKS = 3  # new plans at most, besides the first after timing


class StepHistory:
    """The times of the latest steps of one kind, and how many new plans are left."""

    def __init__(self, looks: int = LOOKS, steps: int = 0) -> None:
        self.walls: deque[WallTimes] = deque(maxlen=LENGTH)
        self.looks = looks
        self.steps = steps
        self.slower: float | None = None  # than when ops were priced: the machine, if steps are off their forecast

    def add(self, wall: WallTimes) -> bool:
        """Add a step; return True if enough steps were added to judge the plan."""
        self.walls.append(wall)
        self.steps += 1
        return len(self.walls) == LENGTH and self.steps % LENGTH == 0

    @property
    def is_untouched(self) -> bool:
        """Return True if no new plan was made because of these times."""
        return self.looks == LOOKS

    @property
    def median_us(self) -> float | None:
        """Microseconds of the median step; None while there are too few steps."""
        return statistics.median(wall.us for wall in self.walls) if len(self.walls) >= FEW else None

    def compare(self, forecast_us: float) -> None:
        """Time the reference op if steps of a CPU are off their forecast: behind the first few, at each full length."""
        is_due = len(self.walls) == FEW or self.steps % LENGTH == 0
        if not is_due or self.walls[-1].device.type != "cpu":
            return
        median = self.median_us
        self.slower = reference_op.slower() if median is not None and is_off(median, forecast_us) else None

    def calls_for_look(self, forecast_us: float, looked_us: float, plain_us: float, search_us: float) -> bool:
        """Return True if the step is to be planned again.

        Its time has left both the forecast and the time measured when it was last planned, and the steps so far have
        lost more than planning took: as many more steps may win that back.

        Args:
            forecast_us: the forecast of the step, in microseconds like all of these.
            looked_us: the measured time of the step when it was last planned.
            plain_us: the step without a plan; no plan is faster.
            search_us: the time that planning took.
        """
        median = self.median_us
        if median is None or not self.looks:
            return False
        changed = is_off(median, forecast_us) and is_off(median, looked_us)
        return changed and self.steps * (median - plain_us) >= search_us

    def after_look(self) -> StepHistory:
        """Return the history after a new plan."""
        return StepHistory(self.looks - 1, self.steps - self.steps % LENGTH)


def forward_backward_us(forecast: Forecast, updates: bool) -> float:
    """Return the microseconds of forward and backward, with the update if backward `updates`."""
    ops = forecast.trace.ops
    last = len(ops)
    while not updates and last and ops[last - 1].phase == "update":
        last -= 1
    return forecast.us if last == len(ops) else forecast.begins[last]
