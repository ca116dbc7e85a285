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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.budget_sweep import sweep
    from .api.compiled_module import CompiledModule
    from .api.compiler import compile, plan
    from .api.training_folder import load_sharded, save_sharded
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
        StagesBudgetError,
        StateError,
        TorchVersionError,
        UnplannedError,
        UpdateError,
    )
    from .integrations.activation_solver import ActivationSolver as ActivationSolver
    from .integrations.lightning_budget import LightningBudget as LightningBudget
    from .integrations.trainer import MemoryBudget
    from .oss import OSS, GradScaler
    from .report.budget_curve import Point, Sweep
    from .report.report import Report
    from .report.saved_plan import SavedPlan
    from .stages.pipeline import Pipeline, pipeline
    from .storage.pinned_pool import PinnedError
    from .storage.spill_file import SpillError
    from .tensors.buckets import pad_to_buckets

NAMES = {  # by module, which is imported when one of its names is asked for
    "api.budget_sweep": ("sweep",),
    "api.compiled_module": ("CompiledModule",),
    "api.compiler": ("compile", "plan"),
    "api.training_folder": ("load_sharded", "save_sharded"),
    "api.training_state": ("load_state", "save_state"),
    "errors": (
        "AgreementError", "BudgetError", "CaptureError", "CollectiveError", "FusedError", "LoweringError",
        "MemgraphError", "NoPlanError", "OpaqueError", "PlanError", "RecordingError", "ShardError",
        "StagesBudgetError", "StateError", "TorchVersionError", "UnplannedError", "UpdateError",
    ),
    "integrations.activation_solver": ("ActivationSolver",),
    "integrations.lightning_budget": ("LightningBudget",),
    "integrations.trainer": ("MemoryBudget",),
    "oss": ("OSS", "GradScaler"),
    "report.budget_curve": ("Point", "Sweep"),
    "report.report": ("Report",),
    "report.saved_plan": ("SavedPlan",),
    "stages.pipeline": ("Pipeline", "pipeline"),
    "storage.pinned_pool": ("PinnedError",),
    "storage.spill_file": ("SpillError",),
    "tensors.buckets": ("pad_to_buckets",),
}  # fmt: skip
MODULES = {name: module for module, names in NAMES.items() for name in names}
TEXTS = ("errors", "report.")  # modules that know no torch

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
    """Import a name when it is asked for: torch's compilers, which tracing needs, take a second."""
    if name == "__version__":
        return _version()
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .system.garbage import paused_collector

    with paused_collector():  # what an import makes stays
        if not MODULES[name].startswith(TEXTS):
            import_module(".system.private_names", __name__)  # checked before others use them
        value = getattr(import_module(f".{MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("memgraph-torch")
    except PackageNotFoundError as error:
        raise AttributeError("memgraph was not installed, so it has no version: pip install .") from error
