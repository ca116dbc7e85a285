"""Train any module under a byte budget."""

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
    PlanError,
    RecordingError,
    ShardError,
    StateError,
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
    "UpdateError",
    "compile",
    "load_sharded",
    "load_state",
    "plan",
    "save_sharded",
    "save_state",
    "sweep",
]
