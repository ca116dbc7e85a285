"""The optimizer of each stage: what its states hold, and what its update takes.

AdamW, a stage with 1.2 MB of parameters   ->   states of 2.4 MB, an update that takes 0.3 MB
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn, optim

from ...optim.optimizer_profiler import OptimizerProfiler, kinds_of
from ...oss.comm.agreement import format_option

MakeOptimizer = Callable[[list[nn.Parameter]], optim.Optimizer]


class StageUpdates:
    """Prices the updates of stages; `make` makes the optimizer of the parameters of one."""

    def __init__(self, module: nn.Module, make: MakeOptimizer | None) -> None:
        self.module, self.make = module, make

    def nbytes(self, names: Collection[str]) -> tuple[int, int]:
        """Return the bytes of the states of these parameters, and the most that an update of them takes.

        Raises:
            UpdateError: the optimizer can't be stepped on made-up parameters.
        """
        if self._profiler is None or not names:
            return 0, 0
        known = dict(self.module.named_parameters())
        own = {id(known[name]) for name in names}
        groups: list[dict[str, Any]] = self._profiler.optimizer.param_groups
        rows = [[p for p in group["params"] if id(p) in own] for group in groups]
        return self._profiler.states_nbytes(kinds_of(rows)), self._profiler.workspace(rows, own)

    def lines(self) -> Iterator[str]:
        """Describe what has to be equal on all ranks."""
        if self._profiler is not None:
            optimizer = self._profiler.optimizer
            options = (f"{name}={format_option(value)}" for name, value in sorted(optimizer.defaults.items()))
            yield f"the optimizer: {type(optimizer).__qualname__}({', '.join(options)})"

    @cached_property
    def _profiler(self) -> OptimizerProfiler | None:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        return OptimizerProfiler(self.make(trained)) if self.make is not None and trained else None

    def optimizer(self, names: Collection[str]) -> optim.Optimizer | None:
        """Return the optimizer of these parameters, or of an empty one; None if no optimizer was asked for."""
        known = dict(self.module.named_parameters())
        parameters = [known[name] for name in names] or [nn.Parameter(torch.empty(0))]
        return self.make(parameters) if self.make is not None else None
