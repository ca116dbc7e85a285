"""Measure the first real step of the optimizer that follows a measured step of the module.

    optimizer.step()    ->   the plain step, under the meter; the module's reports note its bytes

The optimizer's `step` is replaced for one call.  A pair of hooks would not do: only a function around the step ends the
measurement when the step raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..optim.elementwise import replace_step
from ..profile.memory_meter import OutsideMeter, measure_peak, resident_bytes
from ..tensors.parameter_groups import state_tensors
from .step import Step


class UpdateMeasurement:
    """Measures the optimizer's next step, once a module's step has been measured."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self.waiting: list[Step] = []

    def __call__(self, step: Step) -> None:
        """Measure the next update behind `step`, whose gradients exist."""
        if not self.waiting:
            _once(self.optimizer, self._measure)
        self.waiting.append(step)

    def _measure(self, update: Callable[[], Any]) -> Any:
        steps, self.waiting = self.waiting, []
        states = resident_bytes(state_tensors(self.optimizer))
        gradients = [resident_bytes(step.parts.gradients()) for step in steps]
        incomplete = [any(parameter.grad is None for parameter in step.parts.trained) for step in steps]
        outside = OutsideMeter(self.device)
        result, allocated = measure_peak(update, self.device)
        if allocated is not None:
            for step, nbytes, fewer in zip(steps, gradients, incomplete, strict=True):
                unplanned = "the update found fewer gradients than were planned for" if fewer else ""
                # Only the meter outside sees that older blocks are freed, as gradients that a step replaces.
                step.note_update(states + nbytes + min(allocated.peak, outside.peak or allocated.peak), unplanned)
        return result


def _once(optimizer: torch.optim.Optimizer, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Call `around` with the optimizer's next step; a step with a closure, which runs the model, is called alone."""
    before, plain = vars(optimizer).get("step"), optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if not ours:  # called before
            return plain(*args, **kwargs)
        if vars(optimizer).get("step") is ours.pop():  # a scheduler may have wrapped it since
            del optimizer.step
            if before is not None:
                optimizer.step = before  # type: ignore[method-assign]
        closure = any(map(callable, (*args, *kwargs.values())))
        update = functools.partial(plain, *args, **kwargs)
        return update() if closure else around(update)

    # A list that the call empties: a function that named itself would keep the optimizer until garbage is collected.
    ours = [replace_step(optimizer, step)]
    optimizer.step = ours[0]  # type: ignore[method-assign]
