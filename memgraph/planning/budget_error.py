"""The error of a call that no plan fits, with a budget that does and what else would help, as far as there is time.

453058 bytes are allowed; the smallest budget for which a plan was found is 702116.
That is of a call that adds to gradients, as with accumulation; one that adds to none needs 689796: accumulate=False
plans for that alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import passes

from ..errors import BudgetError

FEW = 500  # nodes: to capture so few some times more takes a second or two, limit or not
CAPTURES = 6  # that finding out about micro-batches takes

BudgetErrorMaker = passes.BudgetError


def budget_error(
    error: BudgetErrorMaker, advised: Callable[[BudgetErrorMaker], BudgetErrorMaker], later: Callable[[], int | None]
) -> BudgetError:
    """The error to raise in place of `error`.

    Args:
        advised: returns the error with advice about micro-batches.
        later: returns the bytes that the call needs once there are gradients to add to, if it makes some.
    """
    error = advised(error)
    needed = later()
    if needed is None or needed <= error.smallest:
        return BudgetError(str(error), error.budget, error.smallest)
    text = (
        "That is of a call that adds to gradients, as with accumulation; one that adds to none needs "
        f"{error.smallest}: accumulate=False plans for that alone."
    )
    return BudgetError(f"{_with_smallest(error, needed)}\n{text}", error.budget, needed)


def _with_smallest(error: BudgetErrorMaker, smallest: int) -> str:
    """The error's text, which names another budget wherever it names one."""
    text = str(error)
    for before in ("a plan was found is ", "budget="):
        text = re.sub(rf"{before}{error.smallest}\b", f"{before}{smallest}", text)
    return text


def has_time_left(nodes: int, captured_s: float, until: float) -> bool:
    """Return whether a graph of so many nodes, captured in so many seconds, can be tried in parts before `until`."""
    return nodes <= FEW or time.monotonic() + CAPTURES * captured_s < until


def smallest_budget(plan: Callable[[], Any]) -> int:
    """Return the least bytes for which `plan` found a plan, whose forecast it returns."""
    try:
        return int(plan().peak)
    except passes.BudgetError as error:
        return error.smallest
