"""What memgraph raises, beside TypeError and ValueError for arguments of a wrong kind or value.

    except memgraph.BudgetError as error:    model = memgraph.compile(model, error.smallest)

`SpillError` is in `storage/spill_file.py`, and `PinnedError` in `storage/pinned_pool.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import passes


class MemgraphError(RuntimeError):
    """What all of memgraph's own errors are."""


class TorchVersionError(MemgraphError, ImportError):
    """A torch that lacks a private name which memgraph uses; says which, and with which versions it works."""


class CaptureError(MemgraphError):
    """A module whose step can't be written down as one graph; says where, and what to change."""


class PlanError(MemgraphError, ValueError):
    """A saved plan that can't be used again: damaged, of another step, or over the budget; says which."""


class FusedError(MemgraphError):
    """What would need gradients that `fuse_update=True` has done away with; says what to do."""


class UpdateError(MemgraphError, TypeError):
    """An optimizer whose update can't be planned, or can't be run in windows where it has to be; says why, and what to
    do."""


class LoweringError(MemgraphError):
    """What Inductor can't compile of a step, although `lower="inductor"` wants it; says what it is, and why."""


class RecordingError(MemgraphError):
    """What can't be recorded of a step, although `cuda_graphs=True` wants it; says why, and what to do."""


class StateError(MemgraphError, ValueError):
    """A state, or a file of one, that is none of this model and optimizer, or can't be saved; nothing was changed."""


class ShardError(MemgraphError, ValueError):
    """What an optimizer that is spread over ranks can't take; says what is, and what to do."""


class AgreementError(ShardError):
    """The ranks of a group were given different things; the same error is raised on all of them."""


class CollectiveError(MemgraphError):
    """A collective that has failed; says which one, and who is missing.

    Attributes:
        collective: what the ranks were about.
        ranks: who is gone, stopped or late, as global ranks; empty if every rank has come.
    """

    def __init__(self, message: str, collective: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.collective = collective
        self.ranks = tuple(ranks)


class NoPlanError(MemgraphError, AttributeError):
    """A compiled module that has not been called yet is asked for its plan."""


class BudgetError(passes.BudgetError, MemgraphError):
    """No plan of this step fits the budget.

    Attributes:
        budget: the bytes that were allowed.
        smallest: a budget with which it works, gradients that are there to be added to included.
    """
