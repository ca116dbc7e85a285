"""A budget for the Trainer of transformers, and for those built on it.

Trainer(model, arguments, train_dataset=rows, callbacks=[memgraph.MemoryBudget("24GB")]).train()

->   each step is planned under the budget; the model, its checkpoints and the trainer's log are the plain ones
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..options.compile_options import Budget
from ..report.report import Report
from .budgeted_forward import BudgetedForward


class MemoryBudget(TrainerCallback):  # type: ignore[misc]
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
        self._budget, self._options = budget, options
        self._forward: BudgetedForward | None = None

    @property
    def plan(self) -> Report | None:
        """The report of the latest training step, as `plan` of a compiled module; None before the first call."""
        compiled = self._forward and self._forward.compiled
        return compiled.plan if compiled else None

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **rest: Any) -> None:
        """Replace forward before mixed precision wraps it."""
        self._replace(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, optimizer: Any = None, **rest: Any
    ) -> None:
        """Count the optimizer that the trainer has made."""
        self._replace(model)  # if the callback was added to a trainer that existed
        if self._forward is not None:
            self._forward.count(_unwrapped(optimizer))

    def _replace(self, model: nn.Module | None) -> None:
        if model is not None and self._forward is None:
            self._forward = BudgetedForward(model, self._budget, self._options)
            model.forward = self._forward


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer of torch inside those of accelerate."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
