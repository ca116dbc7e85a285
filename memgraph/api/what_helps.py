"""Plan a step again with options that are not on, to say which of them would help, and how much.

Attempts(make_planner, model, args, kwargs, budget, given).better_than(error)   ->   slices="auto": fits, 31.0 ms
                                                                                     microbatches=2: 1.5 MB will do

Each option is captured, priced and planned alone, with a quick search. Options with which the call can't be captured,
or which gain nothing, are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from passes import BudgetError, make_plan
from passes.concurrent_forwards import plan_forwards
from passes.pipeline import QUICK

from ..errors import BudgetError as MemgraphBudgetError
from ..errors import MemgraphError
from ..optim.elementwise import is_elementwise
from ..optim.optimizer_clone import clone_optimizer
from ..options.compile_options import Budget, CompileArguments
from ..planning.attempts.priced_attempts import PricedAttempts
from ..planning.planner import Planner
from ..planning.progress import Progress
from ..report.report import Report
from ..report.tables import mb_above, ms
from .shapes_only import on_device

LEAST_S, MOST_S = 2.0, 10.0  # after which no further option is tried
MUCH = 0.1  # share of the step that a plan adds, from which on other options are tried
TIMES = 10  # times as much as the budget: no option saves as many bytes
WORTH = 0.02  # share of bytes or of time that an option has to gain
MOST = 4  # options that are named
Options = tuple[tuple[str, CompileArguments], ...]
PARTS: Options = tuple((f"microbatches={count}", {"microbatches": count}) for count in (2, 4, 8))
MEANS: Options = tuple(  # for a scalar that the model itself returns
    (f'{option}, reduction="mean"', {**changed, "reduction": "mean"}) for option, changed in PARTS
)


@dataclass(frozen=True, slots=True)
class Help:
    """The gain from an option.

    Attributes:
        option: as it is written in a call.
        peak: bytes of the plan; if none was found, the smallest budget that works.
        us: microseconds of the step; infinite if no plan was found.
        plain_us: the same without a plan and without the option; 0 if that is not known.
    """

    option: str
    peak: int
    us: float
    plain_us: float

    @property
    def fits(self) -> bool:
        return self.us < math.inf

    def __str__(self) -> str:
        if not self.fits:
            return f"{self.option}: {mb_above(self.peak)} will do"
        longer = f", {self.us / self.plain_us - 1:+.1%}" if self.plain_us else ""
        return f"{self.option}: fits, {ms(self.us)}{longer}"


@dataclass(frozen=True, eq=False)
class Attempts:
    """A call that is planned with options that are not among the given ones.

    Attributes:
        make: `make_planner` of `compiler.py`.
        planned_s: seconds that the call took with the given options; all others together take about as long at most.
    """

    make: Callable[..., Planner]
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    budget: Budget
    given: CompileArguments
    planned_s: float = MOST_S

    def better_than(self, found: Report | BudgetError) -> list[Help]:
        """Return the options that would help, the best first.

        None are tried if the plan that was found costs little, or nothing that fits needs nearly as little.
        """
        is_cheap = isinstance(found, Report) and (not found.plan or found.overhead < MUCH)
        if is_cheap or (isinstance(found, BudgetError) and TIMES * found.budget < found.smallest):
            return []
        plain_us = found.choice.captured.us if isinstance(found, Report) else 0.0
        seconds = min(MOST_S, max(LEAST_S, self.planned_s))
        until, helps = time.monotonic() + seconds, list[Help]()
        for options in _tried(self.given):
            is_captured = False
            for option, changed in options:
                if time.monotonic() >= until:
                    break
                help = self._planned(option, {**self.given, **changed}, plain_us)
                is_captured = is_captured or help is not None
                if help is not None and _is_better(help, found):
                    helps.append(help)
                if help is None or help.fits:
                    break  # more of the same costs more
            if options is PARTS and is_captured:
                break
        return sorted(helps, key=lambda help: (help.us, help.peak))[:MOST]

    def _planned(self, option: str, given: CompileArguments, plain_us: float) -> Help | None:
        """Return the forecast of a quick plan; None if the call can't be captured with these options."""
        with suppress(MemgraphError, RuntimeError, TypeError, ValueError):
            planner = self.make(self.model, self.budget, **given)
            args, kwargs = on_device(planner.module, self.args, self.kwargs, given.get("microbatches", 1))
            with Progress() as progress:
                steps = planner.priced(args, kwargs, planner.options.outputs, progress)
                return _quick(steps, planner, option, plain_us)
        return None


def _quick(steps: PricedAttempts, planner: Planner, option: str, plain_us: float) -> Help:
    """Return the forecast of the first quick plan that fits."""
    search, smallest = partial(make_plan, passes=QUICK), list[int]()
    for step in steps(planner.target.budget):
        try:
            plan = plan_forwards(step.trace, step.machine, planner.options.forwards, search)
        except BudgetError as error:
            smallest.append(error.smallest)
        else:
            return Help(option, plan.forecast.peak, plan.forecast.us, plain_us)
    return Help(option, min(smallest), math.inf, plain_us)


def with_help(error: BudgetError, helps: Sequence[Help]) -> BudgetError:
    """Return the error with a line for each option."""
    if not helps:
        return error
    lines = "\n".join(f"  {help}" for help in helps)
    return MemgraphBudgetError(f"{error}\nWhat else would help, by forecast:\n{lines}", error.budget, error.smallest)


def _tried(given: CompileArguments) -> Iterator[Options]:
    """Yield the options that are not on, in groups: the first that fits ends its group."""
    optimizer = given.get("optimizer")
    if given.get("offload", "auto") is None:
        yield (('offload="auto"', {"offload": "auto"}),)
    elif given.get("wire_dtype") is None:
        yield (("wire_dtype=torch.bfloat16", {"wire_dtype": torch.bfloat16}),)
    if given.get("slices") is None:
        yield (('slices="auto"', {"slices": "auto"}),)
    excluded = given.get("fuse_update") or given.get("host_update") or given.get("accumulate")
    if optimizer is not None and is_elementwise(optimizer) and not excluded and given.get("forwards", 1) == 1:
        # A clone, as the planner of a fused update changes `step` of its optimizer.
        clone = clone_optimizer(optimizer, [dict(group) for group in optimizer.param_groups])
        yield (("fuse_update=True", {"fuse_update": True, "optimizer": clone}),)
    if given.get("microbatches", 1) == 1:
        yield PARTS
        if given.get("reduction") is None:
            yield MEANS


def _is_better(help: Help, found: Report | BudgetError) -> bool:
    if isinstance(found, BudgetError):
        return help.fits or help.peak < (1 - WORTH) * found.smallest
    return help.us < (1 - WORTH) * found.forecast.us
