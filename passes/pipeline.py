"""The passes, in the order in which they run, and the loop that runs them.

    make_plan(trace, machine) -> PlanResult: 40.3 ms, 1.0 GB, overhead 12.8 %

A pass looks at a trace and a machine and returns decisions: those after which the step fits the budget, or, if it finds
none, those that bring the peak lowest.  It may add what it has proven.  It changes nothing, logs nothing, and may count
on `check(trace)`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain

from .analysis.reuse_gaps import ReuseGaps
from .deep.chain import rerun_chain
from .explain import explain_infeasible
from .ir.decisions import Plan, apply
from .ir.errors import BudgetError
from .ir.invariants import check
from .ir.machine import Machine
from .ir.trace import Trace
from .lp import solver
from .lp.problem import proven_nbytes
from .order.microbatch_order import order_like, orders
from .schedule.copy_timing import has_copies, retime_copies
from .schedule.tier_choice import plan_tiers
from .search.greedy import greedy_plan, greedy_plan_no_offload, greedy_thorough
from .search.optimize import optimize, optimize_no_offload, optimize_uncast, prove
from .simulate.bound_proof import BoundProofs
from .simulate.forecast import predict
from .simulate.plan_result import PlanResult, Proposal, SearchInterrupted

Find = Callable[[Trace, Machine, float], Plan | Proposal]  # ends at that time, as `time.monotonic` has it
Log = Callable[[str, PlanResult], None]  # the name of a pass, and the best plan behind it

GOOD_GAP = 0.02  # no further pass runs once the gap is as small
FAIR_GAP = 0.05  # nor does a search, which takes seconds
NOMINAL_US = 1e5  # of an op: longer than any copy, so that passes that offload do so wherever it spares bytes


def quiet(name: str, best: PlanResult) -> None:
    """Log nothing."""


def _always(best: PlanResult) -> bool:
    return True


def _never(best: PlanResult) -> bool:
    return False


def _gap_is_large(best: PlanResult) -> bool:
    return best.gap > FAIR_GAP


@dataclass(frozen=True)
class Pass:
    """A pass, and when it is worth its time.

    Attributes:
        find: searches for a plan until a time.
        offloads: True if its plans may use the tier.
        worth_it: returns True if the pass may improve on a result that fits.
        quick: takes little work; it runs to its end while nothing fits, even if time is up.
    """

    find: Find
    offloads: bool = False
    worth_it: Callable[[PlanResult], bool] = _always
    quick: bool = False

    @property
    def name(self) -> str:
        return self.find.__name__


# Without casts plans are easier to find; without offloading even more so, and the staging of copies is spared.  The
# chain recomputes values more often, section by section.  The last one is for budgets that nothing else keeps.
PASSES: tuple[Pass, ...] = (
    Pass(optimize, offloads=True, worth_it=_gap_is_large),
    Pass(optimize_uncast, offloads=True, worth_it=_gap_is_large),
    Pass(optimize_no_offload, worth_it=_gap_is_large),
    Pass(greedy_plan, offloads=True, quick=True),
    Pass(greedy_plan_no_offload, quick=True),
    Pass(rerun_chain, quick=True),
    Pass(greedy_thorough, offloads=True, worth_it=_never),
)
QUICK = tuple(each for each in PASSES if each.quick)
# For a step that has another plan already.  Those left out are for budgets that are hard to keep.
BESIDE = (Pass(prove), *PASSES[:3], *QUICK[:2])
# Any plan that fits will do.  For a loop over time the last one is the quickest to find it.
FITTING = tuple(replace(each, worth_it=_never) for each in reversed(QUICK))


def make_plan(
    trace: Trace, machine: Machine, passes: tuple[Pass, ...] = PASSES, log: Log = quiet, seconds: float = math.inf,
    interruptible: bool = False, below: float = math.inf,
) -> PlanResult:  # fmt: skip
    """Return the fastest of the passes' plans that fits; no decisions at all, if the step fits as it is.

    After so many `seconds` every pass ends with what it has.  Only while nothing fits, the quick ones still run.  If it
    is `interruptible`, a KeyboardInterrupt ends the search too, as soon as a plan fits: the result says so.

    If only plans of a step that takes less than `below` microseconds are of use, the search ends once it is proven that
    there are none.  The result then has the bounds, and may be over the budget.

    Raises:
        BudgetError: no pass finds a plan that fits, and any would be of use.
    """
    until = time.monotonic() + seconds

    def search(trace: Trace, machine: Machine) -> PlanResult:
        return _search(trace, machine, passes, log, until if seconds else -math.inf, interruptible, below)

    return plan_tiers(trace, machine, search) if machine.behind else search(trace, machine)


def _search(
    trace: Trace, machine: Machine, passes: tuple[Pass, ...], log: Log, until: float, interruptible: bool, below: float
) -> PlanResult:
    """Do what `make_plan` does, on a machine with one tier."""
    captured = lowest = _unplanned(trace, machine)
    timed_out = False
    log("captured", captured)
    if captured.forecast.peak <= machine.budget:
        return captured
    quick = tuple(each for each in passes if each.quick)
    for order in orders(trace, machine):
        if quick and below == math.inf and proven_nbytes(order, machine) > machine.budget:
            continue
        start = captured if order is trace else _unplanned(order, machine)
        result, is_cut = _run(start, machine, passes, log, until, interruptible, below)
        timed_out = timed_out or is_cut
        if result.forecast.peak <= machine.budget or below < math.inf:
            return result
        lowest = min(lowest, result, key=lambda result: result.forecast.peak)
    if quick:
        lowest = nominal_plan(trace, machine, quick)
        log("nominal_prices", lowest)
        if lowest.forecast.peak <= machine.budget:
            return lowest
    text = explain_infeasible(lowest.forecast, machine, lowest.captured.trace)
    if timed_out and until > -math.inf:
        text += "\nPlanning ended at its time limit; with a longer one, time_limit=, a smaller budget may do"
    more = "" if solver.is_installed() else f"\n{solver.MISSING}: with it a smaller budget may do; {solver.INSTALL}"
    raise BudgetError(text + more, machine.budget, lowest.forecast.peak, timed_out)


def nominal_plan(trace: Trace, machine: Machine, quick: tuple[Pass, ...] = QUICK) -> PlanResult:
    """Return the plan that is found if all ops take equally long, and no link is measured, whether it fits or not.

    It is the same in each process, so a budget that an error names works in all of them.  Where none can fit, the
    search ends at a pass that needs no more bytes than every plan does.
    """
    nominal, found = machine.nominal, list[PlanResult]()
    tried = orders(with_nominal_times(trace), nominal)
    least = min(proven_nbytes(order, machine) for order in tried)
    enough = least if least > machine.budget else 0
    for order in tried:
        found.append(_run(_unplanned(order, nominal), nominal, quick, quiet, 0.0, enough=enough)[0])
        if found[-1].forecast.peak <= enough:
            break
    best = min(found, key=lambda result: (max(machine.budget, result.forecast.peak), result.forecast.us))
    start = _unplanned(order_like(trace, best.captured.trace), machine)
    return _better(start, Proposal(best.plan), machine)


def with_nominal_times(trace: Trace) -> Trace:
    """Return the step with times that no process measures."""
    return replace(trace, ops=tuple(replace(op, us=NOMINAL_US) for op in trace.ops))


def _unplanned(trace: Trace, machine: Machine) -> PlanResult:
    """Return the step as it is."""
    check(trace)
    captured = predict(trace, machine)
    return PlanResult((), captured, captured)


def _run(
    best: PlanResult, machine: Machine, passes: tuple[Pass, ...], log: Log, until: float, interruptible: bool = False,
    below: float = math.inf, enough: int = 0,
) -> tuple[PlanResult, bool]:  # fmt: skip
    """Return the fastest of the passes' plans that fits, or the one of the lowest peak, if none does.

    A peak of `enough` bytes ends it too.  The second result is True if a pass had too little time while nothing fitted.
    """
    is_cut, late = False, list[Pass]()
    trace, best, no_offload_us = best.captured.trace, replace(best, greedy=not solver.is_installed()), 0.0
    without_offload = cache(partial(_least_without_offload, trace, machine))
    for each in chain(passes, late):
        fits, is_late = best.forecast.peak <= machine.budget, time.monotonic() >= until
        if best.least.once_us >= below or best.forecast.peak <= enough:
            break
        if fits:
            if not best.plan or best.gap <= GOOD_GAP:
                break
            # Without offloading, every plan adds so much to the step.
            is_slower = not each.offloads and best.forecast.us < best.captured.us + no_offload_us
            if is_late or is_slower or not each.worth_it(best):
                continue
        elif is_late and not each.quick:
            is_cut = True
            continue
        elif each.quick and not each.offloads and without_offload() > machine.budget:
            if each not in late:
                late.append(each)  # it can't fit, and tells the smallest budget where nothing does
                continue
            if without_offload() >= best.forecast.peak:
                continue
        ends = math.inf if each.quick and not fits else until
        try:
            proposal = _retimed(each.find(trace, machine, ends), trace, machine, until)
            best, no_offload_us = _better(best, proposal, machine), max(no_offload_us, proposal.no_offload_us)
        except KeyboardInterrupt as interrupt:
            if not interruptible:
                raise
            best = _until_then(best, interrupt, machine)
            log(each.name, best)
            return best, is_cut
        is_cut = is_cut or time.monotonic() >= ends
        log(each.name, best)
    return best, is_cut


def _least_without_offload(trace: Trace, machine: Machine) -> int:
    """Return the bytes in use at one op, which every plan that offloads nothing needs; 0 if all plans are such."""
    return proven_nbytes(trace, machine.without_tier) if machine.link.out else 0


def _until_then(best: PlanResult, interrupt: KeyboardInterrupt, machine: Machine) -> PlanResult:
    """Return the best plan that was known when the user interrupted; raise that if it does not fit."""
    if isinstance(interrupt, SearchInterrupted):
        best = _better(best, interrupt.proposal, machine)
    if best.forecast.peak > machine.budget:
        raise interrupt
    return replace(best, interrupted=True)


def _retimed(found: Plan | Proposal, trace: Trace, machine: Machine, until: float) -> Proposal:
    """Time the copies of a plan; a proposal comes from a search, which has done so."""
    if isinstance(found, Proposal):
        return found
    if not has_copies(found):
        return Proposal(found)
    return Proposal(retime_copies(ReuseGaps(trace), machine, found, predict(apply(trace, found), machine), until)[0])


def _better(best: PlanResult, proposal: Proposal, machine: Machine) -> PlanResult:
    """Return the better of both, with all that is proven.

    What fits is better than what does not; then what is faster, or of what does not fit, what needs less.
    """
    applied = apply(best.captured.trace, proposal.plan)
    check(applied)
    new = replace(best, plan=proposal.plan, forecast=predict(applied, machine))

    def rank(result: PlanResult) -> tuple[bool, float, float]:
        over = result.forecast.peak > machine.budget
        return over, result.forecast.peak if over else result.forecast.us, result.forecast.peak

    bounds: tuple[PlanResult | Proposal, ...] = best, proposal
    once, many = max(bounds, key=lambda each: each.bound_us), max(bounds, key=lambda each: each.any_us)
    proofs = BoundProofs(once.proofs.once, many.proofs.any_plan)
    return replace(min(best, new, key=rank), bound_us=once.bound_us, any_us=many.any_us, proofs=proofs)
