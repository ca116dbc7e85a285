"""Measure the first real step of the optimizer that follows a measured step of the module.

    optimizer.step()    ->   the plain step, under the meter; the reports of the steps before it take note

The method is put on the optimizer for this one call, and not as a pair of hooks: only one function around the step ends
the measurement whatever the step raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..optim.elementwise import replace_step
from ..optim.optimizer_profiler import state_tensors
from ..profile.memory_meter import measure_peak, resident_bytes
from .step import Step


class UpdateMeasurement:
    """Waits for the optimizer's next step, once a module's step has been measured."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self.waiting: list[Step] = []

    def __call__(self, step: Step) -> None:
        """This step was measured, and its gradients are there."""
        if not self.waiting:
            _once(self.optimizer, self._measure)
        self.waiting.append(step)

    def _measure(self, update: Callable[[], Any]) -> Any:
        steps, self.waiting = self.waiting, []
        states = resident_bytes(state_tensors(getattr(self.optimizer, "inner", self.optimizer)))
        gradients = [resident_bytes(step.gradients_there()) for step in steps]
        missing = [any(parameter.grad is None for parameter in step.trained) for step in steps]
        result, allocated = measure_peak(update, self.device)
        if allocated is not None:
            for step, nbytes, less in zip(steps, gradients, missing, strict=True):
                beyond = "the update found fewer gradients than were planned for" if less else ""
                report = step.report.with_update(states + nbytes + allocated.peak)
                step.report = replace(report, beyond=report.beyond or beyond)
        return result


def _once(optimizer: torch.optim.Optimizer, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Run `around` around the optimizer's next step, unless that runs the model too."""
    before, plain = vars(optimizer).get("step"), optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if vars(optimizer).get("step") is ours:  # a scheduler may have wrapped it since
            del optimizer.step
            if before is not None:
                optimizer.step = before  # type: ignore[method-assign]
        if called:
            return plain(*args, **kwargs)
        called.append(True)
        closure = any(map(callable, (*args, *kwargs.values())))
        update = functools.partial(plain, *args, **kwargs)
        return update() if closure else around(update)

    called: list[bool] = []
    ours = replace_step(optimizer, step)
    optimizer.step = ours  # type: ignore[method-assign]
