"""The attempts at a plan of a call, priced once each, for any budget.

steps(8 << 30)   ->   the step with whole weights, then, as long as the caller asks, in blocks of rows, in smaller ones
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from passes import Machine, Trace

from ...system.planning_process import planning
from ..capture_cache import EarlierCapture
from ..step_graph import StepGraph
from .attempts import Attempt, Attempts


@dataclass(frozen=True)
class PricedStep:
    """A step to plan.

    Attributes:
        cuts: slices and blocks; steps of the same call with the same ones are the same.
    """

    trace: Trace
    machine: Machine
    cuts: object = ()


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
        self.known: dict[object, tuple[Trace, Machine]] = {}  # by what is cut
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
            if attempt.cuts not in self.known:
                self.known[attempt.cuts] = self.price(attempt.graph)
            found.append(PricedStep(*self.known[attempt.cuts], attempt.cuts))
            return True
