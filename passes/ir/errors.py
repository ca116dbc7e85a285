"""Errors of planning."""

from __future__ import annotations

from .decisions import Plan


class BudgetError(RuntimeError):
    """No plan of this step fits the budget.

    Attributes:
        budget: the bytes that were allowed.
        smallest: the fewest bytes for which a plan was found; compiling with exactly these works.
        timed_out: True if the search ended for want of time.
        plan: the plan of `smallest` bytes; empty if the error is of something else than one step.
    """

    def __init__(
        self, message: str, budget: int, smallest: int, timed_out: bool = False, plan: Plan = ()
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.budget = budget
        self.smallest = smallest
        self.timed_out = timed_out
        self.plan = plan

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int, int, bool, Plan]]:
        return type(self), (str(self), self.budget, self.smallest, self.timed_out, self.plan)
