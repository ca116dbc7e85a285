"""The largest size whose step fits a budget, and the next one, which does not.

largest(tried, likely, first=1)   ->   Largest(12, report of 12, 13, 25.1 GB, 4 tried)

To try a size is to capture its step and to plan it, so few are tried. In between, `likely` guesses from those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from passes import BudgetError

from ..report.report import Report

FARTHEST = 1 << 20  # steps of a size that a guess goes to


@dataclass(frozen=True, eq=False)
class Largest:
    """The largest size that fits.

    Attributes:
        report: its plan.
        next: the next size.
        next_nbytes: the fewest bytes for which a plan of that was found; 0 if `size` is the limit.
        tried: the sizes that were captured and planned.
    """

    size: int
    report: Report
    next: int
    next_nbytes: int
    tried: tuple[int, ...]


def largest(
    tried: Callable[[int], Report], likely: Callable[[int], bool], first: int = 1, step: int = 1,
    limit: int | None = None,
) -> Largest:  # fmt: skip
    """Return the largest multiple of `step` that fits, with the next one.

    Args:
        tried: plans the step of a size; it raises a BudgetError if none fits.
        likely: guesses whether a size fits, from those that were tried.
        first: the size to begin with.
        limit: the largest size that is allowed.

    Raises:
        BudgetError: not even `step` fits.
    """
    search = _Search(tried, likely, step, FARTHEST if limit is None else max(1, limit // step))
    start = max(1, min(max(2, first // step), search.most))  # a batch of one has fewer ops, which says less of others
    search.attempt(start)
    search.attempt(2 * start if search.low else max(1, start // 2))
    while search.low + 1 < search.high:
        search.attempt(search.guess())
    return search.found()


class _Search:
    """The sizes that are known: `low` steps fit, `high` do not."""

    def __init__(self, tried: Callable[[int], Report], likely: Callable[[int], bool], step: int, most: int) -> None:
        self.tried, self.likely, self.step, self.most = tried, likely, step, most
        self.low, self.high = 0, most + 1
        self.unlikely = most + 1  # steps that the last guess ended at
        self.reach = 1  # of the next try, where guesses are too low
        self.fits: dict[int, Report] = {}
        self.refused: dict[int, BudgetError] = {}

    def attempt(self, steps: int) -> None:
        """Plan for a size between those that are known."""
        if not self.low < steps < self.high:
            return
        try:
            self.fits[steps] = self.tried(steps * self.step)
            self.low = steps
        except BudgetError as error:
            self.refused[steps] = error
            self.high, self.reach = steps, 1

    def guess(self) -> int:
        """Return the largest size that is likely to fit; if none beyond those that do is, one near or between them."""
        if not self.likely((self.low + 1) * self.step):
            if self.high <= self.most:
                return (self.low + self.high) // 2
            reach, self.reach = self.reach, 2 * self.reach
            return min(self.low + reach, self.most)
        low, high, self.reach = self.low + 1, self.high, 1
        if low < self.unlikely < high and not self.likely(self.unlikely * self.step):
            high = self.unlikely
        reach = low
        while high == self.high and low + reach < high:  # no size is likely not to fit yet
            if self.likely((low + reach) * self.step):
                low, reach = low + reach, 2 * reach
            else:
                high = low + reach
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.likely(middle * self.step) else (low, middle)
        self.unlikely = high
        return low

    def found(self) -> Largest:
        if not self.low:
            raise self.refused[1]
        error = self.refused.get(self.high)
        nbytes, tried = error.smallest if error else 0, (*self.fits, *self.refused)
        sizes = tuple(steps * self.step for steps in sorted(tried))
        return Largest(self.low * self.step, self.fits[self.low], self.high * self.step, nbytes, sizes)
