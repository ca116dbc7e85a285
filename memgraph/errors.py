"""What memgraph raises."""

from __future__ import annotations

import passes


class MemgraphError(RuntimeError):
    """What all of memgraph's own errors are."""


class CaptureError(MemgraphError):
    """A module whose step can't be written down as one graph; says where, and what to change."""


class PlanError(MemgraphError, ValueError):
    """A saved plan that can't be used again: damaged, of another step, or over the budget; says which."""


class FusedError(MemgraphError):
    """What would need gradients that `fuse_update=True` has done away with; says what to do."""


class LoweringError(MemgraphError):
    """What Inductor can't compile of a step, although `lower="inductor"` wants it; says what it is, and why."""


class StateError(MemgraphError, ValueError):
    """A file that is no training state, or one of another model or optimizer; or one that can't be written."""


class ShardError(MemgraphError, ValueError):
    """What an optimizer that is spread over ranks can't take; says what is, and what to do."""


class NoPlanError(MemgraphError, AttributeError):
    """A compiled module that has not been called yet is asked for its plan."""


class BudgetError(passes.BudgetError, MemgraphError):
    """No plan of this step fits the budget.

    Attributes:
        budget: the bytes that were allowed.
        smallest: a budget with which it works, gradients that are there to be added to included.
    """
