"""Plan a step whose forward runs several times before backward, so that all open forwards together keep the budget.

    a, b = model(x), model(y); loss(a, b).backward()

    other_forwards = buffer()  # makes other_forwards:8454144      what the other open forwards hold:
    w = parameter()                                                saved values, inputs, outputs and tangents,
    ...                                                            and a set of gradients to be summed

What an open forward holds depends on the plan.  So plans are searched under several limits for it; each leaves another
share of the budget to the forward or backward that runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from .ir.decisions import Plan, apply
from .ir.errors import BudgetError
from .ir.machine import Machine
from .ir.trace import OTHER_FORWARDS, Op, Storage, Trace
from .lp.problem import proven_nbytes
from .pipeline import QUICK, make_plan, nominal_plan, with_nominal_times
from .simulate.forecast import Forecast, predict
from .simulate.plan_result import PlanResult

Search = Callable[[Trace, Machine], PlanResult]

LIMITS = (0.75, 0.5, 0.35, 0.25, 0.15, 0.08, 0.0)  # shares of what an open forward holds besides inputs and outputs
TIGHT = (0.0, 0.15, 0.35)  # limits that are tried for the smallest budget
ATTEMPTS = 3  # under one limit, each with a smaller budget for the step
ROUNDS = 5  # of the bisection for the smallest plan
FINE = 0.02  # of its bytes: where the bisection ends
STAYS = ("parameter", "buffer", "state", "gradient")


def plan_forwards(trace: Trace, machine: Machine, count: int, search: Search) -> PlanResult:
    """Return the fastest plan with which `count` forwards may be open at once; its trace has a line for the others.

    Raises:
        BudgetError: no plan was found.
    """
    if _is_single(trace, count):
        return search(without_others(trace), machine)
    result = fitting_forwards(trace, machine, count, search) or smallest_plan(trace, machine, count)
    smallest = result.forecast.peak
    if smallest > machine.budget:
        raise BudgetError(
            f"{machine.budget} bytes are allowed; the smallest budget for which a plan was found is {smallest}, with "
            f"{count} forwards open at once. Each holds what it has saved until its backward.\n"
            f"Give budget={smallest}, or a smaller batch, or let each forward have its backward before the next.",
            machine.budget,
            smallest,
        )
    return result


def fitting_forwards(
    trace: Trace, machine: Machine, count: int, search: Search | None, until: float = math.inf
) -> PlanResult | None:
    """Return the fastest plan with which `count` forwards may be open at once; None if none is found.

    Args:
        search: looks for better plans than the quick passes; None leaves it at these.
        until: when the quick passes leave it at a plan that fits, as `time.monotonic` has it.
    """
    trace = without_others(trace)
    for each in _with_useful_tier(trace, machine):
        if not _is_single(trace, count):
            found = _Limits(trace, each, count).best(search, until)
        else:
            found = None
            with suppress(BudgetError):
                found = (search or _quick_plan)(trace, each)
        if found is not None:
            return found
    return None


def fitting_beside(
    trace: Trace, machine: Machine, count: int, open_nbytes: int, search: Search | None
) -> PlanResult | None:
    """Return a plan for a forward beside others that hold so many bytes each, which holds no more itself."""
    if _is_single(trace, count):
        return fitting_forwards(trace, machine, count, search)
    found = (
        choice
        for known in _with_useful_tier(trace, machine)
        for each in (search, _quick_plan)
        if each
        for choice in _Limits(without_others(trace), known, count).limited(open_nbytes, each, open_nbytes)
    )
    return next(found, None)


def smallest_plan(trace: Trace, machine: Machine, count: int) -> PlanResult:
    """Return a plan that takes few bytes. It depends on no budget and no price, so what it takes is one that works."""
    trace, nominal = without_others(trace), machine.nominal
    machines = (nominal, nominal.without_tier) if machine.link.works else (nominal,)
    found = (_smallest_plan(with_nominal_times(trace), each, count) for each in machines)
    plan = same_plan(trace, machine, count, min(found, key=lambda each: each.forecast.peak))
    assert plan is not None, "the ops are the same"
    return plan


def same_plan(trace: Trace, machine: Machine, count: int, other: PlanResult) -> PlanResult | None:
    """Return the plan of a step for these ops, which have other sizes; None if the ops are others.

    No value that it keeps is larger for a smaller batch, so such forwards may be open beside those of the other step.
    """
    order = without_others(other.captured.trace).ops
    if {(op.name, op.fn, op.reads) for op in order} != {(op.name, op.fn, op.reads) for op in trace.ops}:
        return None
    return with_plan(replace(trace, ops=tuple(trace.op[op.name] for op in order)), machine, count, other.plan)


def with_plan(trace: Trace, machine: Machine, count: int, plan: Plan) -> PlanResult:
    """Return a plan with its forecast, while `count` forwards are open at once."""
    trace = without_others(trace)
    if _is_single(trace, count):
        return PlanResult(plan, predict(trace, machine), predict(apply(trace, plan), machine))
    return _Limits(trace, machine, count).with_open_forwards(plan)


def unplanned_nbytes(trace: Trace, machine: Machine, count: int) -> int:
    """Return the bytes that so many open forwards need without a plan."""
    if _is_single(trace, count):
        return predict(trace, machine).peak
    return _Limits(trace, machine, count).plain.forecast.peak


def without_others(trace: Trace) -> Trace:
    """Return the step without the memory of other forwards."""
    return (
        replace(trace, ops=tuple(op for op in trace.ops if op.name != OTHER_FORWARDS)) if trace.other_nbytes else trace
    )


def open_forward_nbytes(forecast: Forecast, at: int | None = None) -> int:
    """Return the bytes that an open forward holds until its backward, its tangents included.

    Parameters, buffers, states and gradients do not count, as all forwards share them.

    Args:
        at: the op of backward before which it waits; None for the first.
    """
    trace, boundary = forecast.trace, forecast.trace.boundary if at is None else at
    stays = {op.name for op in trace.ops if op.fn in STAYS}
    tangents = {op.name for op in trace.ops if op.fn == "tangent"} if at is None else set()
    open_ = (life for life in forecast.lifetimes if life.first < boundary <= life.last or life.producer in tangents)
    return sum(life.nbytes for life in open_ if life.producer not in stays)


def pending_gradient_nbytes(trace: Trace) -> int:
    """Return the bytes of a set of gradients, which autograd or `.grad` holds until the next backward."""
    returned = {
        held for kind, value in trace.outputs if kind in ("gradient", "watched") for held in trace.op[value].holds
    }
    return sum(trace.nbytes[held] for held in returned)


@dataclass(frozen=True)
class _Limits:
    """The plans of a step under several limits for what an open forward holds."""

    trace: Trace
    machine: Machine
    count: int

    @property
    def plain(self) -> PlanResult:
        """Return the step without a plan."""
        return self.with_open_forwards(())

    def best(self, search: Search | None, until: float) -> PlanResult | None:
        """Return the fastest plan of the quick passes under all limits, and of `search` under the best of these."""
        plain = self.plain
        if plain.forecast.peak <= self.machine.budget:
            return plain
        quick: dict[float, PlanResult] = {}
        for limit in LIMITS:
            if not quick or time.monotonic() < until:
                quick.update((limit, choice) for choice in self._plans(limit, _quick_plan))
        best = min(quick, key=lambda limit: quick[limit].forecast.us, default=None)
        if search is None:
            return None if best is None else quick[best]
        limits = [best] if best is not None else [0.5, 0.25, 0.0]
        more = (choice for limit in limits for choice in self._plans(limit, search))
        return min((*quick.values(), *more), key=lambda choice: choice.forecast.us, default=None)

    def with_open_forwards(self, plan: Plan, result: PlanResult | None = None) -> PlanResult:
        """Return a plan with the bytes that other forwards hold under it."""
        nbytes = open_forward_nbytes(predict(apply(self._ordered(result), plan), self.machine))
        trace = _with_others(self._ordered(result), (self.count - 1) * nbytes + pending_gradient_nbytes(self.trace))
        captured, forecast = predict(trace, self.machine), predict(apply(trace, plan), self.machine)
        greedy = result is not None and result.greedy
        return PlanResult(plan, captured, forecast, greedy=greedy)

    def _plans(self, share: float, search: Search) -> Iterator[PlanResult]:
        """Yield the plan found where an open forward may hold so much, if it keeps the budget."""
        plain = predict(self.trace, self.machine)
        nbytes, least = open_forward_nbytes(plain), self._least_nbytes
        yield from self.limited(least + int(share * (nbytes - least)), search)

    def limited(self, limit: int, search: Search, open_nbytes: int = 0) -> Iterator[PlanResult]:
        """Yield the plan found where an open forward may hold so much, and the others hold at least `open_nbytes`."""
        plain = predict(self.trace, self.machine)
        nbytes = open_forward_nbytes(plain)
        others = (self.count - 1) * limit + pending_gradient_nbytes(self.trace)
        # More workspace at the first op of backward leaves less room for values that forward saves.
        room = self.machine.budget - others - (int(plain.total[self.trace.boundary]) - nbytes) - limit
        narrowed = _with_others(_with_workspace(self.trace, max(0, room)), others)
        machine = self.machine
        for _ in range(ATTEMPTS):
            if proven_nbytes(narrowed, machine) > machine.budget:
                return
            try:
                result = search(narrowed, machine)
            except BudgetError:
                return
            whole = self.with_open_forwards(result.plan, result)
            more = max(0, open_nbytes - open_forward_nbytes(whole.forecast))
            over = whole.forecast.peak + (self.count - 1) * more - self.machine.budget
            if over <= 0:
                yield whole
                return
            # Its forwards hold more than the limit, which is only kept at that op.
            machine = replace(machine, budget=machine.budget - over)

    @property
    def _least_nbytes(self) -> int:
        """Return the bytes that an open forward holds under any plan: inputs, outputs and tangents."""
        outputs = [value for kind, value in self.trace.outputs if kind == "output"]
        inputs = [op.name for op in self.trace.ops if op.fn in ("input", "tangent")]
        return sum(self.trace.nbytes[held] for held in self.trace.held_by([*outputs, *inputs]))

    def _ordered(self, result: PlanResult | None) -> Trace:
        """Return the step in the order that was planned, with its own workspaces."""
        if result is None:
            return self.trace
        order = without_others(result.captured.trace).ops
        return replace(self.trace, ops=tuple(replace(op, workspace=self.trace.op[op.name].workspace) for op in order))


def _is_single(trace: Trace, count: int) -> bool:
    """Return True if no other forward is open; those without a backward never are."""
    return count < 2 or trace.boundary == len(trace.ops)


def _smallest_plan(trace: Trace, machine: Machine, count: int) -> PlanResult:
    """Return the plan of one forward with the lowest peak, or a better one for all that are open, by bisection."""
    alone = nominal_plan(trace, replace(machine, budget=1))
    if _is_single(trace, count):
        return alone
    limits = _Limits(trace, machine, count)
    best = min(limits.plain, limits.with_open_forwards(alone.plan, alone), key=lambda each: each.forecast.peak)
    no = min(proven_nbytes(trace, machine), best.forecast.peak) - 1
    for _ in range(ROUNDS):
        between = (no + best.forecast.peak) // 2
        if best.forecast.peak - between <= FINE * best.forecast.peak:
            break
        tight = replace(limits, machine=replace(machine, budget=between))
        found = next((plan for limit in TIGHT for plan in tight._plans(limit, _quick_plan)), None)
        if found is None:
            no = between
        else:
            best = found
    return best


def _with_useful_tier(trace: Trace, machine: Machine) -> tuple[Machine, ...]:
    """Return the machine, if a plan may have room for the staging of copies, and the same without its tier.

    The quick passes may find a plan that recomputes only where they find none that offloads.
    """
    without = machine.without_tier
    if proven_nbytes(trace, machine) + machine.link.staging > machine.budget:
        return (without,)
    return (machine, without) if machine.link.works else (machine,)


def _quick_plan(trace: Trace, machine: Machine) -> PlanResult:
    return make_plan(trace, machine, QUICK)


def _with_workspace(trace: Trace, nbytes: int) -> Trace:
    """Return the step with a larger workspace at the first op of backward."""
    first = trace.ops[trace.boundary]
    ops = (replace(op, workspace=op.workspace + nbytes) if op is first else op for op in trace.ops)
    return replace(trace, ops=tuple(ops))


def _with_others(trace: Trace, nbytes: int) -> Trace:
    op = Op(
        OTHER_FORWARDS,
        "buffer",
        makes=(Storage(OTHER_FORWARDS, nbytes),),
        holds=(OTHER_FORWARDS,),
        where="other open forwards",
    )
    return replace(trace, ops=(op, *trace.ops))
