"""Choose the tier of each value that a plan offloads: the nearest for those that are copied most often.

    host memory, 1 GB, then a disk            s, 1 GB of states: copied back and out in each update    ->   host
                                              a, 1 GB, offloaded once and reloaded once                ->   disk

Plans are searched for on a machine with one tier in place of all: first with one to which no plan copies slower, so
that what is proven there holds for all, then with one that is as fast as the tiers were for the first plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Offload, Plan, Reload, Stream, apply
from ..ir.invariants import check
from ..ir.machine import Link, Machine, cast_type
from ..ir.trace import Trace, type_nbytes
from ..simulate.forecast import Forecast, predict
from ..simulate.plan_result import PlanResult
from .copy_timing import retime_copies

PAGE = 4096  # bytes; values take whole ones of a tier
Search = Callable[[Trace, Machine], PlanResult]


@dataclass(frozen=True, slots=True)
class TierValue:
    """A value that a plan offloads: its bytes, and those that a step copies out and back."""

    value: str
    nbytes: int
    out: int
    back: int

    @property
    def stored_nbytes(self) -> int:
        """Return the bytes that it takes of a tier: whole pages."""
        return -(-self.nbytes // PAGE) * PAGE

    @property
    def copies(self) -> float:
        """Return how often all of its bytes are copied."""
        return (self.out + self.back) / self.nbytes


def plan_tiers(trace: Trace, machine: Machine, search: Search) -> PlanResult:
    """Return a plan for a machine with several tiers, given the search for one of a single tier.

    Raises:
        BudgetError: `search` finds none.
    """
    first = search(trace, machine.joined)
    best = _placed(first, machine)
    if not first.offloads or first.interrupted:
        return best
    second = search(trace, replace(machine.joined, link=_as_one(best, machine)))
    found = min(
        best, _placed(second, machine), key=lambda each: (each.forecast.peak > machine.budget, each.forecast.us)
    )
    return replace(found, bound_us=first.bound_us, any_us=first.any_us, proofs=first.proofs)


def place_values(plan: Plan, trace: Trace, machine: Machine) -> Plan:
    """Return the plan with a tier for each value: where it is already, or the nearest for what is copied most often."""
    room = {tier.name: tier.link.capacity for tier in machine.tiers}
    values = sorted(tier_values(plan, trace), key=lambda each: (trace.op[each.value].tier not in room, -each.copies))
    place = dict[str, str]()
    for each in values:
        free = (name for name, free in room.items() if each.stored_nbytes <= free)
        held = trace.op[each.value].tier
        tier = held if held in room else next(free, machine.tiers[-1].name)
        room[tier] -= each.stored_nbytes
        place[each.value] = "" if tier == machine.tier else tier

    return tuple(
        replace(each, to=place[each.value]) if isinstance(each, Offload | Stream) and each.value in place else each
        for each in plan
    )


def with_held_tiers(trace: Trace, plan: Plan, machine: Machine) -> Trace:
    """Return the trace with the tiers of what a plan has offloaded and lasts: parameters, gradients and states stay."""
    lasting = {value for kind, value in trace.outputs if kind == "gradient"}
    held = {
        each.value: each.to or machine.tier
        for each in plan
        if isinstance(each, Stream) or (isinstance(each, Offload) and each.value in lasting)
    }
    ops = tuple(replace(op, tier=held[op.name]) if op.name in held else op for op in trace.ops)
    return replace(trace, ops=ops) if held and machine.behind else trace


def tier_values(plan: Plan, trace: Trace) -> Iterator[TierValue]:
    """Yield what a plan offloads; an update reads all of it, and writes parameters and states."""
    reloads = Counter(each.value for each in plan if isinstance(each, Reload))
    updated = {read for op in trace.ops if op.phase == "update" for read in op.reads}
    for each in plan:
        if not isinstance(each, Offload | Stream):
            continue
        op = trace.op[each.value]
        wire = each.wire if isinstance(each, Offload) else ""
        nbytes = type_nbytes(cast_type(op.type, wire)) if wire else sum(trace.nbytes[held] for held in op.holds)
        writes = isinstance(each, Offload) or (each.value in updated and op.fn in ("parameter", "state"))
        yield TierValue(each.value, nbytes, nbytes * writes, nbytes * (reloads[each.value] + (each.value in updated)))


def tier_nbytes(plan: Plan, trace: Trace) -> dict[str, int]:
    """Return the bytes that a plan needs in each tier, by name; empty for the nearest."""
    tiers = _tiers(plan)
    found: dict[str, int] = defaultdict(int)
    for each in tier_values(plan, trace):
        found[tiers[each.value]] += each.stored_nbytes
    return dict(found)


def _placed(result: PlanResult, machine: Machine) -> PlanResult:
    """Return a plan for one tier on a machine with several, with copies at the times of those."""
    trace = result.captured.trace
    plan = place_values(result.plan, trace, machine)
    applied = apply(trace, plan)
    check(applied)
    timed: tuple[Plan, Forecast] = retime_copies(ReuseGaps(trace), machine, plan, predict(applied, machine))
    return replace(result, plan=timed[0], captured=predict(trace, machine), forecast=timed[1])


def _as_one(result: PlanResult, machine: Machine) -> Link:
    """Return a link that takes as long for all copies of a plan as the slowest of its tiers does for its own."""
    joined, tiers = machine.joined.link, _tiers(result.plan)
    values = list(tier_values(result.plan, result.captured.trace))
    us: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for each in values:
        tier, (out, back) = machine.link_to(tiers[each.value]), us[tiers[each.value]]
        us[tiers[each.value]] = out + each.out / tier.out, back + each.back / tier.back
    out_us, back_us = max(us.values(), key=sum)
    out, back = sum(each.out for each in values), sum(each.back for each in values)
    return replace(
        joined,
        out=min(joined.out, out / out_us) if out_us else joined.out,
        back=min(joined.back, back / back_us) if back_us else joined.back,
    )


def _tiers(plan: Plan) -> dict[str, str]:
    """Map each value that a plan offloads to its tier."""
    return {each.value: each.to for each in plan if isinstance(each, Offload | Stream)}
