"""Errors of planning."""

from __future__ import annotations


class BudgetError(RuntimeError):
    """No plan of this step fits the budget.

    Attributes:
        budget: the bytes that were allowed.
        smallest: the fewest bytes for which a plan was found; compiling with exactly these works.
        timed_out: True if the search ended for want of time.
        released: `smallest` for a caller that frees the model's outputs before backward; None if that is no less.
    """

    def __init__(
        self, message: str, budget: int, smallest: int, timed_out: bool = False, released: int | None = None
    ) -> None:
        super().__init__(message)
        self.budget = budget
        self.smallest = smallest
        self.timed_out = timed_out
        self.released = released

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int, int, bool, int | None]]:
        return type(self), (str(self), self.budget, self.smallest, self.timed_out, self.released)
