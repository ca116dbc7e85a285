"""A plan beside what it was chosen from: the step as captured, the step as it will run, and what is proven of both.

captured 35.7 ms, 2.5 GB   ->   40.3 ms, 1.0 GB, overhead 12.8 %, at least 12.4 % for any plan of the class
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..ir.decisions import Plan, Recompute, Reload, Stream
from ..ir.machine import Machine
from ..ir.trace import Trace
from .forecast import Forecast, predict


@dataclass(frozen=True, eq=False)
class Proposal:
    """A plan, and microseconds that every plan adds to the step.

    Attributes:
        bound_us: of those in which a value runs again at most once and comes back at most once.
        any_us: of all that recompute in backward only, however often.
        home_us: of those of them that do without the far tier.
    """

    plan: Plan
    bound_us: float = 0.0
    any_us: float = 0.0
    no_offload_us: float = 0.0


@dataclass(frozen=True, eq=False)
class PlanResult:
    """A plan, the step as captured and as it will run, each with its forecast, and what every plan adds.

    Attributes:
        greedy: whether it was made without a search, as HiGHS is not installed: nothing is proven then.
    """

    plan: Plan
    captured: Forecast
    forecast: Forecast
    bound_us: float = 0.0
    any_us: float = 0.0
    greedy: bool = False

    @property
    def lower_bound(self) -> float:
        """Microseconds of a step, less than which no plan of this plan's class takes.  See `Proposal`."""
        bound = self.captured.us + (self.bound_us if self.is_single else self.any_us)
        # The sum of the forecast has another order: a plan that is as good as the bound may miss it by a last bit.
        return self.forecast.us if math.isclose(bound, self.forecast.us, rel_tol=1e-12) else bound

    @property
    def overhead(self) -> float:
        """The time that the plan adds to the step, as a share of it: 0.1 is 10 %."""
        return self.forecast.us / self.captured.us - 1 if self.captured.us else 0.0

    @property
    def gap(self) -> float:
        """How much of the bound's time the plan's is above it: at most so much could be won."""
        return self.forecast.us / self.lower_bound - 1 if self.lower_bound else 0.0

    @cached_property
    def is_single(self) -> bool:
        """Whether no value runs again twice or before it is wanted, or comes back twice; views of what lives far do."""
        ops = self.captured.trace.op
        far = {held for said in self.plan if isinstance(said, Stream) for held in ops[said.value].holds}
        moved = (said for said in self.plan if isinstance(said, Recompute | Reload))
        said = Counter((type(each), each.value) for each in moved if far.isdisjoint(ops[each.value].holds))
        return max(said.values(), default=0) <= 1 and not self._is_early

    @property
    def offloads(self) -> bool:
        """Return True if anything is reloaded from the tier or updated on it."""
        return any(isinstance(decision, Reload | Stream) for decision in self.plan)

    @property
    def _is_early(self) -> bool:
        """Whether anything runs again before somebody wants it.  Parts of what runs again are taken out at once."""
        ops, wanted = self.captured.trace.op, dict[str, set[str]]()
        for said in reversed(self.plan):
            if isinstance(said, Recompute):
                here = wanted.setdefault(said.before, set(ops[said.before].reads))
                if said.value in here:
                    here.update(ops[said.value].reads)
                elif ops[said.value].fn != "getitem":
                    return True
        return False


def with_higher_costs(choice: PlanResult, machine: Machine, us: Mapping[str, float]) -> PlanResult:
    """The same plan where lines, by their names, take at least `us`.

    What is proven at lower prices is true of higher ones: a step in which nothing takes less time is no shorter.
    """
    captured, forecast = _dearer(choice.captured.trace, us), _dearer(choice.forecast.trace, us)
    if (captured, forecast) == (choice.captured.trace, choice.forecast.trace):
        return choice
    plain = predict(captured, machine)
    more = plain.us - choice.captured.us
    bound, any_plan = max(0.0, choice.bound_us - more), max(0.0, choice.any_us - more)
    return PlanResult(choice.plan, plain, predict(forecast, machine), bound, any_plan)


def _dearer(trace: Trace, us: Mapping[str, float]) -> Trace:
    return replace(trace, ops=tuple(replace(op, us=max(op.us, us.get(op.name, 0.0))) for op in trace.ops))
