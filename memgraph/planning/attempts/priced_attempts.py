"""The attempts at a plan of a call, priced once each, for any budget.

steps(8 << 30)   ->   the step with whole weights, then, as long as the caller asks, in blocks of rows, in smaller ones
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from passes import Machine, PlanResult, Trace
from passes.slices.whole_step import Search, needs_none, whole_plan

from ...system.planning_process import planning
from ..known_captures import EarlierCapture
from ..step_graph import StepGraph
from .attempts import Attempt, Attempts, cuts_of


@dataclass(frozen=True)
class PricedStep:
    """A step to plan.

    Attributes:
        cuts: slices and blocks; steps of the same call with the same ones are the same.
        whole: returns the step without slices, which may have a faster plan; None if there is none.
    """

    trace: Trace
    machine: Machine
    cuts: object = ()
    whole: Callable[[Machine], PricedStep | None] = lambda machine: None

    def beside(self, plan: PlanResult, machine: Machine, search: Search) -> tuple[PricedStep, PlanResult] | None:
        """Return the step without slices, and what is known of it beside a plan of this one; None if that counts."""
        step = None if needs_none(plan) else self.whole(machine)
        if step is None:
            return None
        return step, whole_plan(plan, step.trace, replace(step.machine, budget=machine.budget), search)


class PricedAttempts:
    """The attempts of one call."""

    def __init__(
        self, attempts: Callable[[EarlierCapture | None, int], Attempts],
        price: Callable[[StepGraph], tuple[Trace, Machine]], device: torch.device, by_budget: bool,
    ) -> None:  # fmt: skip
        """Begin.

        Args:
            attempts: makes the attempts for a budget, of an earlier capture.
            by_budget: False if they are the same for every budget.
        """
        self.attempts, self.price, self.device, self.by_budget = attempts, price, device, by_budget
        self.earlier: EarlierCapture | None = None
        self.known: dict[object, PricedStep] = {}  # by what is cut
        self.started: dict[int, tuple[list[PricedStep], Iterator[Attempt]]] = {}

    def __call__(self, budget: int) -> Iterator[PricedStep]:
        """Yield the steps to plan for a budget, in their order.

        Raises:
            CaptureError: the module can't be captured.
            FusedError: updates run in backward, and the loss is not part of the step.
        """
        key = budget if self.by_budget else 0
        if key not in self.started:
            self.started[key] = [], iter(self.attempts(self.earlier, budget))
        found, rest = self.started[key]
        for i in itertools.count():
            if i == len(found) and not self._add_next(found, rest):
                return
            yield found[i]

    def _add_next(self, found: list[PricedStep], rest: Iterator[Attempt]) -> bool:
        with planning(self.device):
            attempt = next(rest, None)
            if attempt is None:
                return False
            self.earlier = self.earlier or EarlierCapture(attempt.graph.captured.unsliced)
            found.append(replace(self._priced(attempt.graph), whole=partial(self._whole, attempt)))
            return True

    def _whole(self, attempt: Attempt, machine: Machine) -> PricedStep | None:
        with planning(self.device):
            graph = attempt.whole(machine)
            return None if graph is None else self._priced(graph)

    def _priced(self, graph: StepGraph) -> PricedStep:
        cuts = cuts_of(graph)
        if cuts not in self.known:
            self.known[cuts] = PricedStep(*self.price(graph), cuts)
        return self.known[cuts]
