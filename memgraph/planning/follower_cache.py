"""The plan of the step that adds to gradients, kept on disk beside that of the step that makes them.

first process:    the step that adds is priced and planned     0.4 s for GPT2-124M
second process:   it is read                                   0.02 s

It follows from the step that makes gradients: its ops and prices, the machine, its plan, and the options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable

from passes import Machine, Trace, parse_plan

from ..errors import PlanError
from ..report.saved_plan import with_saved_prices
from .accumulated_step import AccumulatedStep
from .plan_cache import get_facts, put_facts, step_key


def find_follower(
    trace: Trace, machine: Machine, options: Hashable, plan: Callable[[], AccumulatedStep]
) -> AccumulatedStep:
    """Return the step that adds to the gradients of this one, kept or else planned now.

    Args:
        options: everything that it depends on besides this step and the machine.
    """
    key, prices = step_key(trace, machine, options), with_saved_prices(trace, machine)
    facts = get_facts(key)
    if facts is not None and facts.get("prices") == prices:
        try:
            decisions = facts["decisions"]
            found = None if decisions is None else parse_plan("\n".join(decisions))
            return AccumulatedStep(int(facts["needed"]), found)
        except (PlanError, KeyError, TypeError, ValueError):  # a cache on disk may hold anything
            pass
    step = plan()
    decisions = None if step.plan is None else list(map(str, step.plan))
    put_facts(key, json.dumps({"prices": prices, "needed": step.needed, "decisions": decisions}))
    return step
