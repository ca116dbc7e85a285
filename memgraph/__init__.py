"""Train any module under a byte budget.

    model = memgraph.compile(model, budget="8GB", optimizer=optimizer)    the training loop stays as it was
    print(model.plan)                                                     what was decided, forecast and measured
    print(memgraph.plan(model, *args, budget="8GB"))                      the same, before any step
    print(memgraph.sweep(model, *args))                                   what each budget costs
    except memgraph.BudgetError as error: ...                             error.smallest is a budget that works

`help(memgraph.compile)` says what each argument means; the README and `docs/` have the rest.
"""

from . import private_names  # noqa: F401  # isort: split  # looked up before others use them
from .compiler import compile, plan
from .curve import Point, Sweep
from .errors import (
    AgreementError,
    BudgetError,
    CaptureError,
    CollectiveError,
    FusedError,
    LoweringError,
    MemgraphError,
    NoPlanError,
    PlanError,
    RecordingError,
    ShardError,
    StateError,
    TorchVersionError,
    UpdateError,
)
from .module import CompiledModule
from .oss import OSS, GradScaler, load_sharded, save_sharded
from .report import Report
from .saved import SavedPlan
from .slab import PinnedError
from .spill import SpillError
from .sweep import sweep
from .training_state import load_state, save_state

__all__ = [
    "OSS",
    "AgreementError",
    "BudgetError",
    "CaptureError",
    "CollectiveError",
    "CompiledModule",
    "FusedError",
    "GradScaler",
    "LoweringError",
    "MemgraphError",
    "NoPlanError",
    "PinnedError",
    "PlanError",
    "Point",
    "RecordingError",
    "Report",
    "SavedPlan",
    "ShardError",
    "SpillError",
    "StateError",
    "Sweep",
    "TorchVersionError",
    "UpdateError",
    "compile",
    "load_sharded",
    "load_state",
    "plan",
    "save_sharded",
    "save_state",
    "sweep",
]
