"""The error of a call that no plan fits, with a budget that does and what else would help, as far as there is time.

453058 bytes are allowed; the smallest budget for which a plan was found is 689796.
A call that adds to gradients, as with accumulation, needs 702116: budget=702116 does for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import passes

from .errors import BudgetError

FEW = 500  # nodes: to capture so few some times more takes a second or two, limit or not
CAPTURES = 6  # that finding out about micro-batches takes

Error = passes.BudgetError


def over_budget(error: Error, advised: Callable[[Error], Error], later: Callable[[], int | None]) -> BudgetError:
    """The error to raise in place of `error`.

    Args:
        advised: returns the error with advice about micro-batches.
        later: returns the bytes that the call needs once there are gradients to add to, if it makes some.
    """
    error = advised(error)
    needed = later()
    if needed is None:
        return BudgetError(str(error), error.budget, error.smallest)
    smallest = max(error.smallest, needed)
    text = f"A call that adds to gradients, as with accumulation, needs {needed}: budget={smallest} does for both."
    return BudgetError(f"{error}\n{text}", error.budget, smallest)


def leaves_time(nodes: int, captured_s: float, until: float) -> bool:
    """Return whether a graph of so many nodes, captured in so many seconds, can be tried in parts before `until`."""
    return nodes <= FEW or time.monotonic() + CAPTURES * captured_s < until


def smallest_of(plan: Callable[[], Any]) -> int:
    """Return the least bytes for which `plan` found a plan, whose forecast it returns."""
    try:
        return int(plan().peak)
    except passes.BudgetError as error:
        return error.smallest
