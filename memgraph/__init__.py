"""Train any module under a byte budget.

    model = memgraph.compile(model, budget="8GB", optimizer=optimizer)    the training loop stays the same
    print(model.plan)                                                     decisions, forecast and measurement
    print(memgraph.plan(model, *args, budget="8GB"))                      the same, before any step
    print(memgraph.sweep(model, *args))                                   time of the step by budget
    Trainer(..., callbacks=[memgraph.MemoryBudget("8GB")])                the same for transformers' Trainer
    lightning.Trainer(callbacks=[memgraph.LightningBudget("8GB")])        and for Lightning's
    except memgraph.BudgetError as error: ...                             error.smallest is a budget that works

`help(memgraph.compile)` describes each argument; see also the README and `docs/`.
"""

from typing import TYPE_CHECKING, Any

from .system.first_line import print_first_line
from .system.garbage import paused_collector

if TYPE_CHECKING:
    from .integrations.activation_solver import ActivationSolver as ActivationSolver
    from .integrations.lightning_budget import LightningBudget as LightningBudget
    from .integrations.trainer import MemoryBudget

print_first_line()
with paused_collector():  # what an import makes stays
    from .api.budget_sweep import sweep
    from .api.compiled_module import CompiledModule
    from .api.compiler import compile, plan
    from .api.training_state import load_state, save_state
    from .errors import (
        AgreementError,
        BudgetError,
        CaptureError,
        CollectiveError,
        FusedError,
        LoweringError,
        MemgraphError,
        NoPlanError,
        OpaqueError,
        PlanError,
        RecordingError,
        ShardError,
        SnapshotError,
        StagesBudgetError,
        StateError,
        TorchVersionError,
        UnplannedError,
        UpdateError,
    )
    from .oss import OSS, GradScaler, load_sharded, save_sharded
    from .report.budget_curve import Point, Sweep
    from .report.report import Report
    from .report.saved_plan import SavedPlan
    from .stages.pipeline import Pipeline, pipeline
    from .storage.pinned_pool import PinnedError
    from .storage.spill_file import SpillError
    from .system import private_names  # noqa: F401  # isort: split  # checked before others use them
    from .system.pass_log import show_log
    from .tensors.buckets import pad_to_buckets

show_log()

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
    "MemoryBudget",
    "NoPlanError",
    "OpaqueError",
    "PinnedError",
    "Pipeline",
    "PlanError",
    "Point",
    "RecordingError",
    "Report",
    "SavedPlan",
    "ShardError",
    "SnapshotError",
    "SpillError",
    "StagesBudgetError",
    "StateError",
    "Sweep",
    "TorchVersionError",
    "UnplannedError",
    "UpdateError",
    "compile",
    "load_sharded",
    "load_state",
    "pad_to_buckets",
    "pipeline",
    "plan",
    "save_sharded",
    "save_state",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Import what needs transformers, Lightning or Inductor, or reads files, when it is asked for."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(__name__)
        except PackageNotFoundError as error:
            raise AttributeError("memgraph was not installed, so it has no version: pip install .") from error
    if name == "MemoryBudget":
        from .integrations.trainer import MemoryBudget

        return MemoryBudget
    if name == "LightningBudget":
        from .integrations.lightning_budget import LightningBudget

        return LightningBudget
    if name == "ActivationSolver":
        from .integrations.activation_solver import ActivationSolver

        return ActivationSolver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
