"""A module's call -> the step that will run it: capture, summarize, plan, rewrite, split.

This page is the table of contents of the whole: each line of `Planner.step` is one room.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from passes import Choice, Machine, make_plan, predict

from .accumulation import accumulating
from .budget import budget_nbytes
from .capture import Wanted, capture
from .device import device_of, return_freed_memory, unused_nbytes
from .errors import CaptureError
from .peak import resident_bytes
from .probe import Prober
from .report import Report
from .rewrite import fake_mode, rewrite, slot_nbytes
from .signature import has_gradients, is_watched
from .split import split
from .step import Step
from .summarize import summarize
from .tiers import far_tier, linked, tier_name
from .truth import correct
from .update import with_update


@dataclass(frozen=True)
class Wishes:
    """What the caller asked for; see `memgraph.compile`."""

    budget: str | int | float | None
    optimizer: torch.optim.Optimizer | None = None
    offload: str | None = "auto"
    spill_dir: str | PathLike[str] | None = None


class Planner:
    """Plans the steps of one module."""

    def __init__(self, module: nn.Module, wishes: Wishes) -> None:
        self.module = module
        self.wishes = wishes
        self._look()

    def _look(self) -> None:
        """Where the module lies, and what that means for the budget and the far tier; it may be moved later."""
        owned = [*self.module.parameters(), *self.module.buffers()]
        if any(map(is_lazy, owned)):
            raise CaptureError("parameters have no shape yet: run the lazy module once before it is compiled")
        device = device_of(owned)
        if getattr(self, "device", None) != device:
            self.budget = budget_nbytes(self.wishes.budget, device, resident_bytes(owned))
            self.tier = tier_name(self.wishes.offload, device)
            self.device = device

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Wanted) -> Step:
        """The step of this call, planned and ready.

        Raises:
            BudgetError: no plan fits the budget.
            CaptureError: the module can't be captured.
        """
        begin = time.perf_counter()
        self._look()
        self._refuse_hooks()
        captured = capture(self.module, args, kwargs, grad=torch.is_grad_enabled(), wanted=wanted)
        watched = {name for name, parameter in self.module.named_parameters() if is_watched(parameter)}
        graph = accumulating(captured, watched) if has_gradients(self.module.parameters()) else captured.graph.graph
        machine, choice = self._plan(graph)
        planned = rewrite(graph, choice.forecast.trace)
        tier = far_tier(self.device, slot_nbytes(planned), self.wishes.spill_dir)
        if choice.plan and self.device.type == "cpu":
            return_freed_memory()
        us = (time.perf_counter() - begin) * 1e6
        report = Report(machine, choice, planned_us=us, counted=self.wishes.optimizer is not None)
        return Step(captured, split(planned, captured.graph), tier, report)

    def _refuse_hooks(self) -> None:
        """A module's backward hooks would run once, while it is captured, and never again."""
        for name, part in self.module.named_modules():
            if part._backward_hooks or part._backward_pre_hooks:
                raise CaptureError(
                    f"{name or 'the model'} has backward hooks, which a captured step can't call: "
                    "register them on the compiled module, or hooks on parameters and outputs instead"
                )

    def _plan(self, graph: fx.Graph) -> tuple[Machine, Choice]:
        prober = Prober(unused_nbytes(self.device) // 2)
        correct(graph, fake_mode(graph), prober.made)
        trace = summarize(graph, prober)
        if self.wishes.optimizer is not None:
            trace = with_update(trace, self.wishes.optimizer)
        machine = Machine(self.budget, str(self.device))
        if predict(trace, machine).peak > self.budget:
            machine = linked(machine, self.tier, self.device, self.wishes.spill_dir)
        return machine, make_plan(trace, machine)
