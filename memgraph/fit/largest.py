"""The largest size whose step fits a budget, and the next one, which does not.

largest(tried, first=1)   ->   Largest(12, report of 12, 13, 25.1 GB)

A size is tried by capturing its step and planning it, so few are: as bytes grow about linearly, the next size is where
a line through two known ones meets the budget, and every other time the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from passes import BudgetError

from ..report.report import Report

GROWTH = 4  # the most by which a size grows at once


@dataclass(frozen=True, eq=False)
class Largest:
    """The largest size that fits.

    Attributes:
        report: its plan.
        next: the next size.
        next_nbytes: the fewest bytes for which a plan of that was found; 0 if `size` is the limit.
        tried: the number of sizes that were planned.
    """

    size: int
    report: Report
    next: int
    next_nbytes: int
    tried: int


class _Sizes:
    """The sizes that were tried, in steps."""

    def __init__(self, tried: Callable[[int], Report], step: int) -> None:
        self.tried, self.step = tried, step
        self.fits: dict[int, Report] = {}
        self.needs: dict[int, int] = {}
        self.refused: BudgetError | None = None

    def fit(self, steps: int) -> bool:
        """Return True if the step of so many steps of size fits."""
        try:
            report = self.tried(steps * self.step)
        except BudgetError as error:
            self.needs[steps] = error.smallest
            self.refused = error
            return False
        self.fits[steps], self.needs[steps] = report, report.peak
        return True

    def met(self, low: int, high: int, budget: int) -> int:
        """Return where a line through two sizes meets the budget."""
        slope = (self.needs[high] - self.needs[low]) / (high - low)
        return low + int((budget - self.needs[low]) / slope) if slope > 0 else high * GROWTH


def largest(
    tried: Callable[[int], Report], budget: int, first: int = 1, step: int = 1, limit: int | None = None
) -> Largest:
    """Return the largest multiple of `step` that fits, with the next one.

    Args:
        tried: plans the step of a size; it raises a BudgetError if none fits.
        first: the size to begin with.
        limit: the largest size that is allowed.

    Raises:
        BudgetError: not even `step` fits.
    """
    sizes, most = _Sizes(tried, step), None if limit is None else max(1, limit // step)
    steps = max(1, first // step) if most is None else max(1, min(first // step, most))
    low, high = (steps, None) if sizes.fit(steps) else (0, steps)
    while high is None and low != most:
        known = [each for each in sizes.needs if each < low]
        guess = sizes.met(max(known), low, budget) if known else 2 * low
        steps = max(low + 1, min(guess, GROWTH * low, low * GROWTH if most is None else most))
        low, high = (steps, None) if sizes.fit(steps) else (low, steps)
    middle = True
    while high is not None and high - low > 1:
        steps = (low + high) // 2 if middle or not low else sizes.met(low, high, budget)
        steps, middle = max(low + 1, min(steps, high - 1)), not middle
        low, high = (steps, high) if sizes.fit(steps) else (low, steps)
    if not low:
        assert sizes.refused is not None
        raise sizes.refused
    after = low + 1 if high is None else high
    return Largest(low * step, sizes.fits[low], after * step, sizes.needs.get(after, 0), len(sizes.needs))
