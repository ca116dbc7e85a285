"""Plan a step of which several forwards are open at once, so that all of them together keep the budget.

    a, b = model(x), model(y); loss(a, b).backward()

    other_forwards = buffer()  # makes other_forwards:8454144      what the forwards beside this one hold meanwhile:
    w = parameter()                                                their saved values, inputs, outputs and tangents,
    ...                                                            and a set of gradients that waits to be summed

What an open forward holds depends on the plan.  So a plan is looked for under several limits of that, each of which
leaves more or less of the budget to the forward or backward that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .ir.decisions import Plan, apply
from .ir.errors import BudgetError
from .ir.machine import Machine
from .ir.trace import OTHER_FORWARDS, Op, Storage, Trace
from .pipeline import QUICK, make_plan
from .simulate.forecast import Forecast, predict
from .simulate.plan_result import PlanResult

Search = Callable[[Trace, Machine], PlanResult]

LIMITS = (0.75, 0.5, 0.35, 0.25, 0.15, 0.08, 0.0)  # of what an open forward may hold beyond what is handed in and out
TIGHT = (0.0, 0.15, 0.35)  # of these, where the least budget is looked for
ATTEMPTS = 3  # under one limit, each with less for the step
ROUNDS = 6  # in which the smallest budget is halved in on
STAYS = ("parameter", "buffer", "state", "gradient")


def plan_forwards(trace: Trace, machine: Machine, count: int, search: Search) -> PlanResult:
    """The fastest plan found with which `count` forwards may be open at once; its trace has a line for the others.

    Raises:
        BudgetError: none was found.
    """
    trace = without_others(trace)
    if count < 2 or trace.boundary == len(trace.ops):  # forwards without a backward are never open
        return search(trace, machine)
    found = _Shares(trace, machine, count).found(search)
    if found is None:
        smallest = _smallest(trace, machine, count)
        raise BudgetError(
            f"{machine.budget} bytes are allowed; the smallest budget for which a plan was found is {smallest}, with "
            f"{count} forwards open at once, each of which holds what it has saved until its backward.\n"
            f"Give budget={smallest}, or a smaller batch, or let each forward have its backward before the next.",
            machine.budget,
            smallest,
        )
    return found


def unplanned_nbytes(trace: Trace, machine: Machine, count: int) -> int:
    """The bytes that so many open forwards of the step need if nothing is decided."""
    if count < 2 or trace.boundary == len(trace.ops):
        return predict(trace, machine).peak
    return _Shares(trace, machine, count).plain.forecast.peak


def without_others(trace: Trace) -> Trace:
    """The step alone."""
    return (
        replace(trace, ops=tuple(op for op in trace.ops if op.name != OTHER_FORWARDS)) if trace.other_nbytes else trace
    )


def open_forward_nbytes(forecast: Forecast) -> int:
    """The bytes that an open forward holds until its backward, and its tangents then; what all forwards share is left
    out: parameters, buffers, states and gradients."""
    trace, turn = forecast.trace, forecast.trace.boundary
    stays = {op.name for op in trace.ops if op.fn in STAYS}
    tangents = {op.name for op in trace.ops if op.fn == "tangent"}
    open_ = (life for life in forecast.lifetimes if life.first < turn <= life.last or life.producer in tangents)
    return sum(life.nbytes for life in open_ if life.producer not in stays)


def pending_gradient_nbytes(trace: Trace) -> int:
    """The bytes of a set of gradients, which waits in autograd, or in `.grad`, for those of the next backward."""
    handed = {
        held for kind, value in trace.outputs if kind in ("gradient", "watched") for held in trace.op[value].holds
    }
    return sum(trace.nbytes[held] for held in handed)


@dataclass(frozen=True)
class _Shares:
    """The plans of one step under several limits of what an open forward may hold."""

    trace: Trace
    machine: Machine
    count: int

    @property
    def plain(self) -> PlanResult:
        """The step as it is."""
        return self._whole(())

    @property
    def fits(self) -> bool:
        """Whether the quick passes find a plan under a tight limit."""
        return any(True for limit in TIGHT for _ in self._tried(limit, _quickly))

    def found(self, search: Search) -> PlanResult | None:
        """The fastest plan: by the quick passes under all limits, and by a `search` under the best of these."""
        plain = self.plain
        if plain.forecast.peak <= self.machine.budget:
            return plain
        quick = {limit: choice for limit in LIMITS for choice in self._tried(limit, _quickly)}
        best = min(quick, key=lambda limit: quick[limit].forecast.us, default=None)
        limits = [best] if best is not None else [0.5, 0.25, 0.0]
        more = (choice for limit in limits for choice in self._tried(limit, search))
        return min((*quick.values(), *more), key=lambda choice: choice.forecast.us, default=None)

    def _tried(self, share: float, search: Search) -> Iterator[PlanResult]:
        """The plan found where an open forward may hold so much, if there is one that keeps the budget."""
        plain = predict(self.trace, self.machine)
        held, least = open_forward_nbytes(plain), self._handed
        limit = least + int(share * (held - least))
        others = (self.count - 1) * limit + pending_gradient_nbytes(self.trace)
        # So many bytes at the first op of backward leave no room for more to be held across the turn.
        room = self.machine.budget - others - (int(plain.total[self.trace.boundary]) - held) - limit
        narrowed = _with_others(_narrowed(self.trace, max(0, room)), others)
        machine = self.machine
        for _ in range(ATTEMPTS):
            try:
                found = search(narrowed, machine)
            except BudgetError:
                return
            whole = self._whole(found.plan, found)
            over = whole.forecast.peak - self.machine.budget
            if over <= 0:
                yield whole
                return
            # Its forwards hold more than the limit, which only room at the turn keeps; so it gets that much less.
            machine = replace(machine, budget=machine.budget - over)

    @property
    def _handed(self) -> int:
        """What an open forward holds whatever is decided: what it was given, what it returns, and the tangents."""
        outputs = {
            held for kind, value in self.trace.outputs if kind == "output" for held in self.trace.op[value].holds
        }
        given = {held for op in self.trace.ops if op.fn in ("input", "tangent") for held in op.holds}
        return sum(self.trace.nbytes[held] for held in outputs | given)

    def _whole(self, plan: Plan, found: PlanResult | None = None) -> PlanResult:
        """A plan with what it really lets other forwards hold."""
        held = open_forward_nbytes(predict(apply(self._ordered(found), plan), self.machine))
        trace = _with_others(self._ordered(found), (self.count - 1) * held + pending_gradient_nbytes(self.trace))
        captured, forecast = predict(trace, self.machine), predict(apply(trace, plan), self.machine)
        greedy = found is not None and found.greedy
        return PlanResult(plan, captured, forecast, greedy=greedy)

    def _ordered(self, found: PlanResult | None) -> Trace:
        """The step in the order that was planned, with its own workspaces."""
        if found is None:
            return self.trace
        order = without_others(found.captured.trace).ops
        return replace(self.trace, ops=tuple(replace(op, workspace=self.trace.op[op.name].workspace) for op in order))


def _smallest(trace: Trace, machine: Machine, count: int) -> int:
    """A budget for which the quick passes find a plan, halved in on from what the step needs as it is."""
    no = machine.budget
    yes = unplanned_nbytes(trace, machine, count)
    for _ in range(ROUNDS):
        between = (no + yes) // 2
        if _Shares(trace, replace(machine, budget=between), count).fits:
            yes = between
        else:
            no = between
    return yes


def _quickly(trace: Trace, machine: Machine) -> PlanResult:
    return make_plan(trace, machine, QUICK)


def _narrowed(trace: Trace, nbytes: int) -> Trace:
    """The step whose first op of backward takes so much more."""
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
