"""A budget for the Trainer of Lightning.

lightning.Trainer(callbacks=[memgraph.LightningBudget("24GB")]).fit(module, loader)

->   forward of the LightningModule is planned under the budget; checkpoints and loops are the plain ones
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ..errors import UnplannedError
from ..options.compile_options import Budget
from ..report.report import Report
from .budgeted_forward import ModuleBudget, TrainerReads

if find_spec("lightning") is not None:
    from lightning.pytorch import Callback, LightningModule  # pyright: ignore[reportMissingImports] # optional
else:
    from pytorch_lightning import Callback, LightningModule  # pyright: ignore[reportMissingImports] # optional

# The state of Lightning's loop: the hook that runs, and the metrics that are logged. Forward does not read it.
LOOP_STATE = (
    "_current_fx_name", "_metric_attributes", "_param_requires_grad_state", "_compiler_ctx", "_fabric_optimizers",
)  # fmt: skip
THEIRS = {"optimizer", "loss", "microbatches", "reduction", "fuse_update"}


class LightningBudget(Callback):  # type: ignore[misc]
    """Runs forward and backward of one module under a budget, in training, validation, test and prediction.

    The trainer's loggers get `memory_peak_mb`, `memory_forecast_mb`, `memory_budget_mb` and `memory_overhead`.

    The module's forward is replaced in place while the trainer runs, so that precision, accumulation, clipping,
    validation, checkpoints and resuming work as without it. A method `generate` that needs no gradients runs the plain
    forward. States of the trainer's optimizer are counted if it is the only one.
    What `training_step` computes beside the module, as the loss, is not counted: give a module that returns the loss to
    have it in the plan.

    Args:
        budget: bytes of the device for the whole step, as in `memgraph.compile`.
        module: path of the module, as "model" for `self.model`; by default the LightningModule itself, or its only
            child where it has no forward.
        options: others of `memgraph.compile`, as `offload` or `time_limit`.

    Raises:
        TypeError: an option is given that is the trainer's.
    """

    def __init__(self, budget: Budget = None, module: str = "", **options: Any) -> None:
        if theirs := THEIRS & options.keys():
            raise TypeError(
                f"{', '.join(sorted(theirs))}= is for memgraph.compile: the trainer has the optimizer, the loss and "
                "accumulate_grad_batches, and runs backward in the closure of optimizer.step()"
            )
        self._path, self._budget = module, ModuleBudget(budget, options)
        self._module: nn.Module | None = None
        self._own: Callable[[], dict[str, Any]] = dict

    @property
    def plan(self) -> Report | None:
        """The report of the latest training step, as `plan` of a compiled module; None before the first call."""
        return self._budget.report

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Replace forward before a strategy wraps the module.

        Raises:
            ValueError: there is no such module, or none was named and it is not clear which.
            UnplannedError: torch.compile runs the steps of the module.
        """
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise UnplannedError(
                "torch.compile(LightningModule) and LightningBudget both run its steps: choose one. Give the trainer "
                'the plain module, and LightningBudget(..., lower="inductor") for kernels of torch.compile'
            )
        if self._module is None:
            self._module = _chosen(pl_module, self._path)
            self._own = partial(_own_state, vars(self._module), TrainerReads(trainer))
        self._cover()

    def _cover(self) -> None:
        """Plan the forward that the module has now."""
        if self._module is not None:
            self._budget.begin_step(self._module, self._own)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Count the optimizer that the trainer has made, or has restored."""
        optimizers = trainer.optimizers
        if len(optimizers) == 1 and isinstance(optimizers[0], torch.optim.Optimizer):
            self._budget.count(optimizers[0])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Drop the gradients of the step before: Lightning does so between forward and backward only."""
        if pl_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
        self._cover()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """
        Raises:
            UnplannedError: this step has not called the module.
        """
        if pl_module.automatic_optimization:
            self._budget.end_step(self._budget.calls)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """
        Raises:
            UnplannedError: no step has called the module; one that steps by hand may leave it out later.
        """
        if not pl_module.automatic_optimization and self.plan is None:
            self._budget.end_step(self._budget.calls)
        if trainer.loggers and (scalars := self._budget.scalars):
            pl_module.log_dict(scalars, on_step=True, on_epoch=False)

    def on_validation_batch_start(self, *event: Any, **rest: Any) -> None:
        self._cover()

    def on_test_batch_start(self, *event: Any, **rest: Any) -> None:
        self._cover()

    def on_predict_batch_start(self, *event: Any, **rest: Any) -> None:
        self._cover()

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Give the module its own forward again; the plan stays readable."""
        self._budget.uncover()
        self._module = None


def _own_state(attributes: Mapping[str, Any], reads: TrainerReads) -> dict[str, Any]:
    """Return what the captured module has in place of the state of Lightning's loops."""
    own: dict[str, Any] = dict.fromkeys(name for name in LOOP_STATE if name in attributes)
    if "_trainer" in attributes:
        own |= {"_trainer": reads, "_trainer_reads": reads.refreshed()}
    return own


def _chosen(pl_module: nn.Module, path: str) -> nn.Module:
    if path:
        try:
            return pl_module.get_submodule(path)
        except AttributeError as error:
            raise ValueError(f"module={path!r} is no submodule ({error}); {_children(pl_module)}") from error
    if type(pl_module).forward is not LightningModule.forward and type(pl_module).forward is not nn.Module.forward:
        return pl_module
    trained = [child for child in pl_module.children() if any(True for _ in child.parameters())]
    if len(trained) != 1:
        found = f"{type(pl_module).__name__} has no forward and {len(trained)} children with parameters"
        raise ValueError(f"{found}; {_children(pl_module)}")
    return trained[0]


def _children(pl_module: nn.Module) -> str:
    names = ", ".join(name for name, _ in pl_module.named_children())
    return f'name the module that training_step calls, as LightningBudget("8GB", module="model"); there are: {names}'
