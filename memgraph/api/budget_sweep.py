"""What a budget costs: the step's time for every budget, from what the step needs as it is down to the least there is.

    print(memgraph.sweep(model, x))

      budget   forecast     step  overhead  ...
      942 MB     942 MB  7090 ms     +0.0%
      641 MB     640 MB  7150 ms     +0.8%  ...  knee
      310 MB     310 MB  9800 ms    +38.2%  ...  smallest

The module is captured and priced once, and planned once a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from passes import BudgetError, Machine, PlanResult, Trace, make_plan, predict
from passes.concurrent_forwards import as_it_is_nbytes, plan_forwards

from ..options.argument_rules import check_argument
from ..options.compile_options import parse_options
from ..planning.progress import Progress
from ..report.budget_curve import Point, Sweep, point_of_plan, point_of_refusal
from ..system.byte_sizes import budget_nbytes
from .compiler import in_microbatches, make_planner

POINTS = 12  # between the two ends


def sweep(
    model: nn.Module, *args: Any, optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Any] | None = None, offload: str | None = "auto", spill_dir: str | PathLike[str] | None = None,
    budgets: Sequence[str | int | float] | None = None, time_limit: float | None = None,
    wire_dtype: torch.dtype | None = None, microbatches: int = 1, reduction: str | None = None,
    accumulate: bool | None = None, forwards: int = 1, fuse_update: bool = False, host_update: bool = False,
    lower: str | None = "auto", pinned: str | int | float | None = None, cuda_graphs: bool | str = False, **kwargs: Any,
) -> Sweep:  # fmt: skip
    """The time that the step of the call `model(*args, **kwargs)` takes for every budget, without running a step.

    It is the step as the module stands now; one that adds to gradients needs more than one that makes them, and is what
    `accumulate=True` asks for.

    Args:
        budgets: what to plan for, each as in `compile`; by default what the step needs as it is, the smallest budget
            for which there is a plan, and 12 between them at even distances.  Those for which no plan was found are
            points that do not fit.
        time_limit: seconds for each plan.

    Raises:
        TypeError, ValueError, SpillError, CaptureError, FusedError: as `compile` and its first call.
    """
    # A budget of a byte, so that the links are measured.
    asked = parse_options(
        1, optimizer=optimizer, offload=offload, spill_dir=spill_dir, time_limit=time_limit, wire_dtype=wire_dtype,
        accumulate=accumulate, forwards=forwards, fuse_update=fuse_update, host_update=host_update, lower=lower,
        pinned=pinned, cuda_graphs=cuda_graphs,
    )  # fmt: skip
    planner = make_planner(in_microbatches(model, loss, microbatches, reduction), asked)
    several = check_argument("budgets", budgets)  # all of them, before anything is captured
    wanted = several and [budget_nbytes(check_argument("budget", budget), planner.target.device) for budget in several]
    trace, machine = planner.price(args, kwargs, asked.wanted)
    return _Sweeping(trace, machine, asked.time_limit, asked.forwards).run(wanted)


class _Sweeping:
    """Plans one step for many budgets."""

    def __init__(self, trace: Trace, machine: Machine, seconds: float, forwards: int = 1) -> None:
        self.trace, self.machine, self.seconds, self.forwards = trace, machine, seconds, forwards
        self.plain = predict(trace, machine)
        self.smallest = self.most = as_it_is_nbytes(trace, machine, forwards)
        self.found: list[tuple[int, PlanResult]] = []  # plans, and the budgets that they were searched for

    def run(self, budgets: Sequence[int] | None) -> Sweep:
        with Progress() as progress:
            self._try(1)  # says what the smallest budget is
            known = set(self._spread() if budgets is None else budgets)
            progress.phase("planning for each budget", len(known))
            for budget in sorted(known):
                self._try(budget)
                progress.done()
        if budgets is None:
            known.add(self.smallest)
        points = tuple(map(self._point, sorted(known, reverse=True)))
        greedy = any(choice.greedy for _, choice in self.found)
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
            self.found.append((budget, choice))

    def _point(self, budget: int) -> Point:
        """The fastest of all plans found that fits, with all that is proven of this budget or a larger one."""
        fits = [choice for _, choice in self.found if choice.forecast.peak <= budget]
        if not fits:
            return point_of_refusal(budget, self.smallest, self.plain.us)
        best = min(fits, key=lambda choice: (choice.forecast.us, len(choice.plan)))
        proven = [choice for tried, choice in self.found if tried >= budget]
        bound_us = max((choice.bound_us for choice in proven), default=0.0)
        any_us = max((choice.any_us for choice in proven), default=0.0)
        return point_of_plan(budget, replace(best, bound_us=bound_us, any_us=any_us))
