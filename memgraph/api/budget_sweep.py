"""The time of a step for every budget, from what it needs without a plan down to the smallest that works.

    print(memgraph.sweep(model, x))

      budget   forecast     step  overhead  ...
      942 MB     942 MB  7090 ms     +0.0%
      641 MB     640 MB  7150 ms     +0.8%  ...  knee
      310 MB     310 MB  9800 ms    +38.2%  ...  smallest

The module is captured once, and planned for each budget as `compile` does: with whole weights, and where these do not
fit, with weights in blocks of rows; in slices or without, if they may be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from passes import BudgetError, Machine, PlanResult, Trace, make_plan, predict
from passes.concurrent_forwards import plan_forwards, unplanned_nbytes
from passes.pipeline import BESIDE
from passes.simulate.plan_result import LeastTimes
from passes.slices.whole_step import is_faster

from ..options.argument_rules import check_argument
from ..planning.attempts import PricedStep
from ..planning.progress import Progress
from ..report.budget_curve import Point, Sweep, point_of_plan, point_of_refusal
from ..system.byte_sizes import budget_nbytes
from .compiler import make_planner
from .shapes_only import on_device

POINTS = 12  # between the two ends
UNLIMITED = 1 << 62


def sweep(
    model: nn.Module, *args: Any, optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Any] | None = None, offload: str | None = "auto", spill_dir: str | PathLike[str] | None = None,
    budgets: Sequence[str | int | float] | None = None, time_limit: float | None = None,
    wire_dtype: torch.dtype | None = None, microbatches: int = 1, reduction: str | None = None,
    accumulate: bool | None = None, forwards: int = 1, fuse_update: bool = False, host_update: bool = False,
    lower: str | None = None, host: str | int | float | None = None,
    disk: str | int | float | None = None, cuda_graphs: bool | str = False,
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
        forwards=forwards, fuse_update=fuse_update, host_update=host_update, lower=lower, host=host, disk=disk,
        cuda_graphs=cuda_graphs,
        opaque=opaque, slices=slices,
    )  # fmt: skip
    given = check_argument("budgets", budgets)  # all of them, before anything is captured
    wanted = given and [budget_nbytes(check_argument("budget", one), planner.target.device) for one in given]
    args, kwargs = on_device(planner.module, args, kwargs, microbatches)
    limit = planner.options.time_limit
    seconds = math.inf if limit is None else limit
    with Progress() as progress:  # one byte of budget: links are measured
        steps = planner.priced(args, kwargs, planner.options.outputs, progress, for_any_budget=True)
        return _BudgetPlans(steps, seconds, planner.options.forwards).sweep(wanted, progress)


@dataclass(frozen=True)
class _Found:
    """The plan that a search for a budget found, of a step.

    Attributes:
        counts: False if a plan with slices was taken instead; what is proven holds all the same.
    """

    budget: int
    step: PricedStep
    choice: PlanResult
    counts: bool = True


class _BudgetPlans:
    """The plans of one call for many budgets."""

    def __init__(self, steps: Callable[[int], Iterator[PricedStep]], seconds: float, forwards: int = 1) -> None:
        self.steps, self.seconds, self.forwards = steps, seconds, forwards
        plain = next(steps(UNLIMITED))
        self.plain = predict(plain.trace, plain.machine)
        self.smallest = self.most = unplanned_nbytes(plain.trace, plain.machine, forwards)
        self.device = plain.machine.device
        self.plans: list[_Found] = []

    def sweep(self, budgets: Sequence[int] | None, progress: Progress) -> Sweep:
        self._try(1)  # finds the smallest budget
        wanted = set(self._spread() if budgets is None else budgets)
        progress.phase("planning for each budget", len(wanted))
        for budget in sorted(wanted):
            self._try(budget)
            progress.done()
        if budgets is None:
            wanted.add(self.smallest)
        points = tuple(map(self._point, sorted(wanted, reverse=True)))
        greedy = any(found.choice.greedy for found in self.plans)
        return Sweep(points, self.smallest, self.most, self.plain.us, self.device, greedy)

    def _spread(self) -> list[int]:
        least, most = self.smallest, self.most
        return [least + (most - least) * i // (POINTS + 1) for i in range(POINTS + 2)]

    def _try(self, budget: int) -> None:
        """Plan as `compile` does: the first step counts for which there is a plan."""
        for step in self.steps(budget):
            machine = replace(step.machine, budget=budget)
            try:
                search = partial(make_plan, seconds=self.seconds)
                choice = plan_forwards(step.trace, machine, self.forwards, search)
            except BudgetError as error:
                self.smallest = min(self.smallest, error.smallest)
            else:
                self.smallest = min(self.smallest, choice.forecast.peak)
                self.plans.append(_Found(budget, step, choice))
                if self.seconds and (whole := step.beside(choice, machine, self._search_below)) is not None:
                    self.plans.append(_Found(budget, *whole, counts=is_faster(whole[1], choice, machine.budget)))
                return

    def _search_below(self, trace: Trace, machine: Machine, us: float) -> PlanResult:
        return make_plan(trace, machine, BESIDE, seconds=self.seconds, below=us)

    def _point(self, budget: int) -> Point:
        """Return the fastest plan that fits, with all bounds proven for its step and this budget or a larger one."""
        fits = [found for found in self.plans if found.counts and found.choice.forecast.peak <= budget]
        if not fits:
            return point_of_refusal(budget, self.smallest, self.plain.us)
        best = min(fits, key=lambda found: (found.choice.forecast.us, len(found.choice.plan)))
        own = self._proven(budget, best)
        others = [self._proven(budget, each).least for each in self.plans if each.budget == budget]
        return point_of_plan(budget, replace(own, others=LeastTimes.of(others) if others else None))

    def _proven(self, budget: int, found: _Found) -> PlanResult:
        """Return a plan with all that is proven of plans in the same slices."""
        proven = [each.choice for each in self.plans if each.budget >= budget and each.step.cuts == found.step.cuts]
        bound_us = max((choice.bound_us for choice in proven), default=0.0)
        any_us = max((choice.any_us for choice in proven), default=0.0)
        return replace(found.choice, bound_us=bound_us, any_us=any_us)
