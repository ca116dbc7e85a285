"""The optimizer of each stage: what its states hold, and what its update takes.

AdamW, a stage with 1.2 MB of parameters           ->   states of 2.4 MB, an update that takes 0.3 MB
OSS with AdamW over 2 replicas of the pipeline     ->   states of 1.2 MB, an update that takes 0.7 MB
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from functools import cached_property, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn, optim

from ...optim.optimizer_profiler import OptimizerProfiler
from ...optim.parameter_kind import kinds_of
from ...oss import OSS
from ...oss.comm.agreement import format_option
from ...oss.comm.watchdog import CollectiveWatchdog
from ...oss.compiled.step_memory import largest_update_nbytes
from ..ranks.stage_group import StageGroup

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
        known = dict(self.module.named_parameters())
        if self._sharded is not None:
            return largest_update_nbytes(self._sharded, [known[name] for name in names]) if names else (0, 0)
        if self._profiler is None or not names:
            return 0, 0
        own = {id(known[name]) for name in names}
        groups: list[dict[str, Any]] = self._profiler.optimizer.param_groups
        rows = [[p for p in group["params"] if id(p) in own] for group in groups]
        return self._profiler.states_nbytes(kinds_of(rows)), self._profiler.workspace(rows, own)

    def lines(self) -> Iterator[str]:
        """Describe what has to be equal on all ranks."""
        optimizer = self._whole
        if optimizer is not None:
            options = (f"{name}={format_option(value)}" for name, value in sorted(optimizer.defaults.items()))
            yield f"the optimizer: {type(optimizer).__qualname__}({', '.join(options)})"

    @property
    def replicas(self) -> CollectiveWatchdog | None:
        """The ranks that have the same stages in other pipelines; None if no sharded optimizer tells."""
        return replicas_of(self._whole)

    @property
    def _sharded(self) -> OSS | None:
        return self._whole if isinstance(self._whole, OSS) else None

    @cached_property
    def _profiler(self) -> OptimizerProfiler | None:
        return OptimizerProfiler(self._whole) if self._whole is not None else None

    @cached_property
    def _whole(self) -> optim.Optimizer | None:
        """The optimizer of all parameters; a sharded one is made on all ranks at once."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        return self.make(trained) if self.make is not None and trained else None

    def optimizer(self, names: Collection[str]) -> optim.Optimizer | None:
        """Return the optimizer of these parameters, or of an empty one; None if no optimizer was asked for."""
        known = dict(self.module.named_parameters())
        parameters = [known[name] for name in names] or [nn.Parameter(torch.empty(0))]
        return self.make(parameters) if self.make is not None else None


def end_together(optimizer: optim.Optimizer, group: StageGroup) -> None:
    """Let an error of the optimizer's step on one rank end the others, which wait for it in the next mini-batch."""
    kind, own = type(optimizer), weakref.ref(optimizer)

    @wraps(kind.step)
    def step(_: object, *args: Any, **kwargs: Any) -> Any:
        with group.ending_together():
            return kind.step(own(), *args, **kwargs)  # type: ignore[arg-type]

    if "step" not in vars(optimizer):  # else something else wraps it
        vars(optimizer)["step"] = MethodType(step, weakref.proxy(optimizer))  # schedulers wrap a bound method


def kept_states(optimizer: optim.Optimizer | None) -> list[Any]:
    """Return what an optimizer keeps on this rank."""
    own = optimizer.inner if isinstance(optimizer, OSS) else optimizer
    return [] if own is None else [value for state in own.state.values() for value in state.values()]


def replicas_of(optimizer: optim.Optimizer | None) -> CollectiveWatchdog | None:
    """Return the ranks over which an optimizer is sharded; None for any other."""
    return optimizer.watchdog if isinstance(optimizer, OSS) and not optimizer.comm.is_alone else None
