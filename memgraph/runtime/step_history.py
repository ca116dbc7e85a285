"""Compare what the latest steps took with their forecast, and say when to plan again.

    20 steps of 110 ms at the median, forecast 98 ms    ->    the report says so: 12 % more than forecast
    ... and it was 97 ms when the plan was last looked at   ->   look at it again, if that may pay

Only whole steps are timed, which takes microseconds; op by op, a step is timed where its plan is looked at.
"""

from __future__ import annotations

import statistics
from collections import deque

from passes import Forecast

from ..profile.step_timer import WallTimes
from ..report.step_times import LENGTH, is_off

LOOKS = 3  # at a plan, at most, besides the first


class StepHistory:
    """The times of the latest steps of one kind, and how often their plan was looked at because of them."""

    def __init__(self, looks: int = LOOKS, steps: int = 0) -> None:
        self.walls: deque[WallTimes] = deque(maxlen=LENGTH)
        self.looks = looks  # that are left
        self.steps = steps  # of this kind, so far

    def add(self, wall: WallTimes) -> bool:
        """Take note of a step; whether so many have come that they are to be judged."""
        self.walls.append(wall)
        self.steps += 1
        return len(self.walls) == LENGTH and self.steps % LENGTH == 0

    @property
    def is_untouched(self) -> bool:
        """Whether no look was taken because of these times."""
        return self.looks == LOOKS

    @property
    def median_us(self) -> float | None:
        """Microseconds of the median step; None while there are too few."""
        return statistics.median(wall.us for wall in self.walls) if len(self.walls) == LENGTH else None

    def calls_for_look(self, forecast_us: float, looked_us: float, plain_us: float, search_us: float) -> bool:
        """Whether the plan is to be looked at again.

        It is if its steps take other than forecast, other than when it was last looked at, and if the steps so far
        have lost more than the search took: then as many again may win that back.

        Args:
            forecast_us: of the step, in microseconds, as all of these.
            looked_us: what a step took when its plan was last looked at.
            plain_us: of the step without a plan, than which no plan is faster.
            search_us: what planning took.
        """
        median = self.median_us
        if median is None or not self.looks:
            return False
        changed = is_off(median, forecast_us) and is_off(median, looked_us)
        return changed and self.steps * (median - plain_us) >= search_us

    def after_look(self) -> StepHistory:
        """What to go on with once the plan is looked at."""
        return StepHistory(self.looks - 1, self.steps - self.steps % LENGTH)


def forward_backward_us(forecast: Forecast, updates: bool) -> float:
    """Microseconds of forward and backward; with the update where backward `updates`."""
    ops = forecast.trace.ops
    last = len(ops)
    while not updates and last and ops[last - 1].phase == "update":
        last -= 1
    return forecast.us if last == len(ops) else forecast.begins[last]
