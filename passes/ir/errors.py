"""Errors of planning."""

from __future__ import annotations


class BudgetError(RuntimeError):
    """No plan of this step fits the budget.

    Attributes:
        budget: the bytes that were allowed.
        smallest: the fewest bytes for which a plan was found; compiling with exactly these works.
    """

    def __init__(self, message: str, budget: int, smallest: int) -> None:
        super().__init__(message)
        self.budget = budget
        self.smallest = smallest

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int, int]]:
        return type(self), (str(self), self.budget, self.smallest)
