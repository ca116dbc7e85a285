"""A budget for the Trainer of transformers, and for those built on it.

Trainer(model, arguments, train_dataset=rows, callbacks=[memgraph.MemoryBudget("24GB")]).train()

->   each step is planned under the budget; the model, its checkpoints and the trainer's log are the plain ones
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

    Args:
        budget: bytes of the device for the whole step, as in `memgraph.compile`.
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
        compiled = self._budget.compiled
        return compiled.plan if compiled else None

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
        trainer = running(transformers.Trainer)
        if trainer is not None:
            refuse_compiled(trainer.model_wrapped)
        model = trainer.model if trainer is not None else model
        if model is not None:
            self._budget.begin_step(model)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer of torch inside those of accelerate."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
