"""A budget for the Trainer of transformers, and for those built on it.

Trainer(model, arguments, train_dataset=rows, callbacks=[memgraph.MemoryBudget("24GB")]).train()

->   each step is planned under the budget; the model and its checkpoints are the plain ones, and lines of the trainer's
     log have the bytes of steps beside the loss

{'loss': 2.31, 'learning_rate': 5e-05, 'memory_peak_mb': 6871.2, 'memory_budget_mb': 8000.0, ...}
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from ..errors import UnplannedError
from ..options.compile_options import Budget
from ..report.report import Report
from ..system.frames import running
from ..system.user_warning import warn_user
from .budgeted_forward import ModuleBudget, refuse_compiled


class MemoryBudget(transformers.TrainerCallback):  # type: ignore[misc]
    """Runs each training and evaluation step of a Trainer under a budget.

    Forward of the trainer's model is replaced in place when the trainer is made, so that mixed precision, accumulation,
    clipping, evaluation, checkpoints and resuming work as without it.  States of the trainer's optimizer are counted
    from the begin of training on.  `generate` runs the plain model.  A loss that calls the model
    twice before backward needs `forwards=2`.

    Lines of the log that have a loss get `memory_peak_mb`, measured if it is known, `memory_forecast_mb`,
    `memory_budget_mb`, and `memory_overhead`, the forecast share of a step's time that the plan adds.

    Args:
        budget: bytes of the device for the whole step, as in `memgraph.compile`. Without one it is `memory_budget` of
            the trainer's arguments, if these have that, then the environment's MEMGRAPH_BUDGET, then what is free.
        options: others of `memgraph.compile`, as `offload` or `time_limit`.

    Raises:
        TypeError: `optimizer`, `loss` or `microbatches` is given, which are the trainer's.
    """

    def __init__(self, budget: Budget = None, **options: Any) -> None:
        if theirs := {"optimizer", "loss", "microbatches", "reduction"} & options.keys():
            raise TypeError(
                f"{', '.join(sorted(theirs))}= is for memgraph.compile: the trainer has the optimizer, the loss and "
                "gradient_accumulation_steps"
            )
        self._budget = ModuleBudget(budget, options)

    @property
    def plan(self) -> Report | None:
        """The report of the latest training step, as `plan` of a compiled module; None before the first call."""
        return self._budget.report

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **rest: Any) -> None:
        """Replace forward before mixed precision wraps it."""
        self._begin(args, model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, optimizer: Any = None, **rest: Any
    ) -> None:
        """Count the optimizer that the trainer has made."""
        self._begin(args, model)  # if the trainer has made another model, or the callback was added late
        trainer = running(transformers.Trainer)
        self._budget.count(_unwrapped(trainer.optimizer if trainer is not None else optimizer))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **rest: Any) -> None:
        """Replace the forward that the trainer has now."""
        self._begin(args, model)

    def on_substep_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """
        Raises:
            UnplannedError: the step has not called the model.
        """
        self._budget.end_step(self._budget.trained)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """
        Raises:
            UnplannedError: the step has not called the model.
        """
        self._budget.end_step(self._budget.trained)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **rest: Any
    ) -> None:
        """Say if a batch of an evaluation has not called the model, and plan the next one."""
        if not self._budget.calls:
            warn_user("a batch of this evaluation ran outside of the budget, since forward was replaced before it")
        self._begin(args, model)

    def _begin(self, args: Any, model: nn.Module | None) -> None:
        """Cover the model that the trainer has now: callbacks are given the first one that it had."""
        if getattr(args, "torch_compile", False):
            raise UnplannedError(
                "torch_compile=True and MemoryBudget both run the steps of the model: choose one. Leave out "
                'torch_compile, and give MemoryBudget(..., lower="inductor") for kernels of torch.compile'
            )
        self._budget.default(getattr(args, "memory_budget", None))
        trainer = running(transformers.Trainer)
        if trainer is not None:
            refuse_compiled(trainer.model_wrapped)
            self._log_first(trainer.callback_handler)
        model = trainer.model if trainer is not None else model
        if model is not None:
            self._budget.begin_step(model)

    def _log_first(self, handler: Any) -> None:
        """Let the log have the bytes before others read it: TensorBoard and Weights & Biases are told first."""
        if not any(isinstance(each, MemoryLog) for each in handler.callbacks):
            handler.callbacks = [MemoryLog(self._budget), *handler.callbacks]  # it is running through the old list


class MemoryLog(transformers.TrainerCallback):  # type: ignore[misc]
    """Adds the bytes of planned steps to the lines of a trainer's log."""

    def __init__(self, budget: ModuleBudget) -> None:
        self._budget = budget

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        if logs is not None and "loss" in logs:
            logs |= self._budget.scalars
            if state.log_history:  # a copy, which checkpoints have
                state.log_history[-1] |= self._budget.scalars


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer of torch inside those of accelerate."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
