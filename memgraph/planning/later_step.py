"""The step of the same call once gradients exist: its plan, and the bytes that it needs, before the first step runs.

    the first step needs 16.8 MB of 17.0, and the step that adds to its gradients 17.9    ->    a warning

    first process:    it is priced and planned     0.4 s for GPT2-124M
    second process:   its plan is read             0.02 s

It follows from the step that makes gradients: its ops and prices, the machine, its plan, and the options.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from passes import BudgetError, Machine, Plan, PlanResult, Trace, parse_plan

from ..errors import PlanError
from ..guards.signature import parameters_with_grad_hooks
from ..report.saved_plan import with_saved_prices
from .accumulated_step import AccumulatedStep, plan_accumulated, warn_accumulation
from .plan_cache import get_facts, put_facts, step_key
from .pricing import Pricing
from .search import PlanSearch
from .step_graph import StepGraph

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LaterStep:
    """The step that adds to the gradients of `first`, if such a call may come."""

    first: StepGraph
    pricing: Pricing
    search: PlanSearch

    def needed_nbytes(self) -> int:
        """Return the least bytes for which the quick passes find a plan; 0 if no such call comes."""
        if self.first.later is None:
            return 0
        quick = replace(self.search, until=time.monotonic(), is_last=False)
        try:
            return self.first.ranks.choose(*self.pricing(self.first.later), quick).forecast.peak
        except BudgetError as error:
            return error.smallest

    def accumulated(
        self, result: PlanResult, machine: Machine, other: Callable[[], AccumulatedStep | None]
    ) -> AccumulatedStep:
        """Return what it needs once the first step has this plan; warn if that is more than the budget.

        A user who interrupts this, or has interrupted the search, wants to begin: such a call is planned when it comes.

        Args:
            other: the same of the step with other slices or none, which such a call tries as well.
        """
        options = self.search.options
        if self.first.later is None or options.plans or result.interrupted:
            return AccumulatedStep()
        try:
            found = self.unwarned(result, machine)
            if found.plan is None:
                found = min(found, other() or found, key=lambda step: step.needed)
            warn_accumulation(found, machine.budget)
            return found if options.forwards == 1 else replace(found, plan=None)  # several leave less for each
        except KeyboardInterrupt:
            if self.first.ranks.plan_together:  # the others would wait
                raise
            LOG.warning("interrupted: calls that add to gradients are not planned yet; interrupt again to stop")
            return AccumulatedStep()

    def unwarned(self, result: PlanResult, machine: Machine) -> AccumulatedStep:
        """Return what it needs once the first step has this plan."""
        graph, options = self.first.later, self.search.options
        if graph is None:
            return AccumulatedStep()
        ranks, is_alone = graph.ranks, options.forwards == 1
        tries = ((), result.plan) if is_alone else ()
        plan = partial(self._planned, graph, tries)
        if is_alone and not ranks.plan_together:
            hooked = tuple(sorted(parameters_with_grad_hooks(self.pricing.module)))
            depends = "adds to gradients", options.search_key, hooked
            return find_or_plan(result.captured.trace, machine, depends, plan)
        return plan()

    def _planned(self, graph: StepGraph, tries: Sequence[Plan]) -> AccumulatedStep:
        trace, machine = self.pricing(graph)
        until = math.inf if graph.ranks.plan_together else self.search.until  # ranks end at different times
        return plan_accumulated(trace, machine, tries, partial(graph.ranks.choose, search=self.search), until)


def find_or_plan(
    trace: Trace, machine: Machine, options: Hashable, plan: Callable[[], AccumulatedStep]
) -> AccumulatedStep:
    """Return the step that adds to the gradients of this one, kept on disk or else planned now.

    Args:
        options: everything that it depends on besides this step and the machine.
    """
    key, prices = step_key(trace, machine, options), with_saved_prices(trace, machine)
    facts = get_facts(key)
    if facts is not None and facts.get("prices") == prices:
        try:
            decisions = facts["decisions"]
            known = None if decisions is None else parse_plan("\n".join(decisions))
            return AccumulatedStep(int(facts["needed"]), known)
        except (PlanError, KeyError, TypeError, ValueError):  # a cache on disk may hold anything
            pass
    step = plan()
    decisions = None if step.plan is None else list(map(str, step.plan))
    put_facts(key, json.dumps({"prices": prices, "needed": step.needed, "decisions": decisions}))
    return step
