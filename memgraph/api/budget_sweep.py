"""The time of a step for every budget, from what it needs without a plan down to the smallest that works.

    print(memgraph.sweep(model, x))

      budget   forecast     step  overhead  ...
      942 MB     942 MB  7090 ms     +0.0%
      641 MB     640 MB  7150 ms     +0.8%  ...  knee
      310 MB     310 MB  9800 ms    +38.2%  ...  smallest

The module is captured and priced once, and planned once for each budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from passes import BudgetError, Machine, PlanResult, Trace, make_plan, predict
from passes.concurrent_forwards import plan_forwards, unplanned_nbytes

from ..options.argument_rules import check_argument
from ..planning.progress import Progress
from ..report.budget_curve import Point, Sweep, point_of_plan, point_of_refusal
from ..system.byte_sizes import budget_nbytes
from .compiler import make_planner
from .shapes_only import on_device

POINTS = 12  # between the two ends


def sweep(
    model: nn.Module, *args: Any, optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Any] | None = None, offload: str | None = "auto", spill_dir: str | PathLike[str] | None = None,
    budgets: Sequence[str | int | float] | None = None, time_limit: float | None = None,
    wire_dtype: torch.dtype | None = None, microbatches: int = 1, reduction: str | None = None,
    accumulate: bool | None = None, forwards: int = 1, fuse_update: bool = False, host_update: bool = False,
    lower: str | None = None, pinned: str | int | float | None = None, cuda_graphs: bool | str = False,
    opaque: bool | Sequence[str] = True, slices: str | Mapping[str, int] | None = None, **kwargs: Any,
) -> Sweep:  # fmt: skip
    """Return the time of the call `model(*args, **kwargs)` for every budget, without running a step.

    A step that adds to gradients needs more memory than one that makes them; `accumulate=True` plans that one.

    Args:
        budgets: the budgets to plan for, each as in `compile`; by default what the step needs without a plan, the
            smallest budget for which there is a plan, and 12 evenly spaced between them.  A budget without a plan is a
            point that does not fit.
        time_limit: seconds for each plan; None for no limit.

    Raises:
        TypeError, ValueError, SpillError, CaptureError, FusedError: as `compile` and its first call.
    """
    planner = make_planner(
        model, 1.0, optimizer=optimizer, loss=loss, offload=offload, spill_dir=spill_dir, time_limit=time_limit,
        wire_dtype=wire_dtype, microbatches=microbatches, reduction=reduction, accumulate=accumulate,
        forwards=forwards, fuse_update=fuse_update, host_update=host_update, lower=lower, pinned=pinned,
        cuda_graphs=cuda_graphs,
        opaque=opaque, slices=slices,
    )  # fmt: skip
    given = check_argument("budgets", budgets)  # all of them, before anything is captured
    wanted = given and [budget_nbytes(check_argument("budget", one), planner.target.device) for one in given]
    args, kwargs = on_device(planner.module, args, kwargs, microbatches)
    trace, machine = planner.price(args, kwargs, planner.options.outputs, for_any_budget=True)
    limit = planner.options.time_limit
    seconds = math.inf if limit is None else limit
    return _BudgetPlans(trace, machine, seconds, planner.options.forwards).sweep(wanted)


class _BudgetPlans:
    """The plans of one step for many budgets."""

    def __init__(self, trace: Trace, machine: Machine, seconds: float, forwards: int = 1) -> None:
        self.trace, self.machine, self.seconds, self.forwards = trace, machine, seconds, forwards
        self.plain = predict(trace, machine)
        self.smallest = self.most = unplanned_nbytes(trace, machine, forwards)
        self.plans: list[tuple[int, PlanResult]] = []  # with the budget of each search

    def sweep(self, budgets: Sequence[int] | None) -> Sweep:
        with Progress() as progress:
            self._try(1)  # finds the smallest budget
            wanted = set(self._spread() if budgets is None else budgets)
            progress.phase("planning for each budget", len(wanted))
            for budget in sorted(wanted):
                self._try(budget)
                progress.done()
        if budgets is None:
            wanted.add(self.smallest)
        points = tuple(map(self._point, sorted(wanted, reverse=True)))
        greedy = any(choice.greedy for _, choice in self.plans)
        return Sweep(points, self.smallest, self.most, self.plain.us, self.machine.device, greedy)

    def _spread(self) -> list[int]:
        least, most = self.smallest, self.most
        return [least + (most - least) * i // (POINTS + 1) for i in range(POINTS + 2)]

    def _try(self, budget: int) -> None:
        try:
            search = partial(make_plan, seconds=self.seconds)
            choice = plan_forwards(self.trace, replace(self.machine, budget=budget), self.forwards, search)
        except BudgetError as error:
            self.smallest = min(self.smallest, error.smallest)
        else:
            self.smallest = min(self.smallest, choice.forecast.peak)
            self.plans.append((budget, choice))

    def _point(self, budget: int) -> Point:
        """Return the fastest plan that fits, with all bounds proven for this budget or a larger one."""
        fits = [choice for _, choice in self.plans if choice.forecast.peak <= budget]
        if not fits:
            return point_of_refusal(budget, self.smallest, self.plain.us)
        best = min(fits, key=lambda choice: (choice.forecast.us, len(choice.plan)))
        proven = [choice for tried, choice in self.plans if tried >= budget]
        bound_us = max((choice.bound_us for choice in proven), default=0.0)
        any_us = max((choice.any_us for choice in proven), default=0.0)
        return point_of_plan(budget, replace(best, bound_us=bound_us, any_us=any_us))
