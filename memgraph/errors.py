"""Typed errors of memgraph. Arguments of a wrong type or value raise TypeError or ValueError.

    except memgraph.BudgetError as error:    model = memgraph.compile(model, error.smallest)

`SpillError` is in `storage/spill_file.py`, and `PinnedError` in `storage/pinned_pool.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import passes


class MemgraphError(RuntimeError):
    """Base class of all errors that memgraph defines."""


class TorchVersionError(MemgraphError, ImportError):
    """This torch lacks a private name that memgraph uses. The message lists the names and the tested versions."""


class CaptureError(MemgraphError):
    """The step can't be captured as one graph. The message says where, and what to change.

    Attributes:
        attribute: path of the attribute that forward changes, if that is the reason; empty otherwise.
    """

    attribute = ""

    def about(self, attribute: str) -> Self:
        """Return this error, about an attribute."""
        self.attribute = attribute
        return self


class OpaqueError(MemgraphError):
    """A part that runs as it is did not do what it did when it was captured. The message says which, and why."""


class PlanError(MemgraphError, ValueError):
    """A saved plan can't be reused: it is damaged, belongs to another step, or exceeds the budget."""


class FusedError(MemgraphError):
    """An operation needs gradients that `fuse_update=True` has already freed."""


class UpdateError(MemgraphError, TypeError):
    """The optimizer's update can't be planned, or can't be run in windows. The message says why, and what to do."""


class LoweringError(MemgraphError):
    """Inductor can't compile a part of the step that `lower="inductor"` asks for."""


class RecordingError(MemgraphError):
    """The step can't be recorded as CUDA graphs, which `cuda_graphs=True` asks for."""


class StateError(MemgraphError, ValueError):
    """A training state can't be saved, or does not belong to this model and optimizer. Nothing was changed."""


class ShardError(MemgraphError, ValueError):
    """The sharded optimizer does not support a parameter, an option or a call."""


class AgreementError(ShardError):
    """The ranks of a group were given different arguments. The same error is raised on all of them."""


class CollectiveError(MemgraphError):
    """A collective has failed.

    Attributes:
        collective: description of the collective.
        ranks: global ranks that ended, stopped or are late; empty if every rank took part.
    """

    def __init__(self, message: str, collective: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.collective = collective
        self.ranks = tuple(ranks)


class UnplannedError(MemgraphError, TypeError):
    """Calls run outside of the budget, or would: another library runs or replaces them. The message says what to do."""


class NoPlanError(MemgraphError, AttributeError):
    """The compiled module has no plan yet, because it was not called."""


class BudgetError(passes.BudgetError, MemgraphError):
    """No plan of this step fits the budget.

    Attributes:
        budget: bytes that were allowed.
        smallest: a budget that works, also if gradients are accumulated.
    """


class StagesBudgetError(BudgetError):
    """No plan keeps the budgets of a pipeline's ranks.

    Attributes:
        budget: bytes that were allowed, for each rank.
        smallest: budgets that work, for each rank, as `budget=` of a new pipeline takes them.
        balance: where its stages have to begin then, if an earlier call has chosen that; else None.
    """

    budget: list[int]  # type: ignore[assignment]
    smallest: list[int]  # type: ignore[assignment]

    def __init__(
        self, message: str, budget: Iterable[int], smallest: Iterable[int], balance: Iterable[int] | None = None
    ) -> None:
        super().__init__(message, 0, 0)
        self.budget, self.smallest = [*budget], [*smallest]
        self.balance = None if balance is None else [*balance]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.budget, self.smallest, self.balance)
