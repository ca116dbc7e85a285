"""The passes, in the order in which they run, and the loop that runs them.

A pass looks at a trace and a machine and returns decisions: those after which the step fits the budget, or, if it finds
none, those that bring the peak lowest.  It may add what it has proven.  It changes nothing, logs nothing, and may count
on `check(trace)`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from .analysis.reuse_gaps import ReuseGaps
from .deep.anneal import anneal
from .deep.chain import rerun_chain
from .deep.phase_search import cut_backward
from .explain import explain_infeasible
from .ir.decisions import Plan, Reload, Stream, apply
from .ir.errors import BudgetError
from .ir.invariants import check
from .ir.machine import Machine
from .ir.trace import Trace
from .lp import solver
from .order.microbatch_order import slice_microbatches
from .schedule.copy_timing import has_copies, retime_copies
from .search.greedy import greedy_plan, greedy_plan_no_offload
from .search.optimize import optimize, optimize_no_offload, optimize_uncast
from .simulate.forecast import predict
from .simulate.plan_result import PlanResult, Proposal

Pass = Callable[[Trace, Machine, float], Plan | Proposal]  # which ends at that time, as `time.monotonic` has it
Log = Callable[[str], None]

# Without casts plans are easier to find; without the far tier even more so, and its staging is spared.  Where once does
# not do, values run again more often: value by value, phase by phase and re-run by re-run, and slice by slice, if that
# finds nothing near.
PASSES: tuple[Pass, ...] = (
    optimize,
    optimize_uncast,
    optimize_no_offload,
    cut_backward,
    anneal,
    rerun_chain,
    greedy_plan,
    greedy_plan_no_offload,
)
SEARCHES: tuple[Pass, ...] = (optimize, optimize_uncast, optimize_no_offload)
# Those that plan without the far tier only.
WITHOUT_OFFLOAD: tuple[Pass, ...] = (optimize_no_offload, cut_backward, anneal, rerun_chain, greedy_plan_no_offload)
QUICK: tuple[Pass, ...] = (greedy_plan, greedy_plan_no_offload)  # asked without time as well, as long as nothing fits
QUICK_WORK = 15_000  # ops that these simulate in fine steps under a limit of time: some hundred milliseconds
GOOD_GAP = 0.02  # a gap at which no further pass is asked
FAIR_GAP = 0.05  # a gap at which no further search is: it takes seconds


def quiet(line: str) -> None:
    """Log nothing."""


def make_plan(
    trace: Trace, machine: Machine, passes: tuple[Pass, ...] = PASSES, log: Log = quiet, seconds: float = math.inf
) -> PlanResult:
    """The fastest of the passes' plans with which the step fits; no decisions at all, if the step fits as it is.

    After so many `seconds` every pass ends with what it has; only if nothing fits yet, a quick one is still asked: in
    coarse steps where fine ones would take long.

    Raises:
        BudgetError: no pass finds a plan that fits.
    """
    until = time.monotonic() + seconds
    captured = lowest = _captured(trace, machine)
    log(f"{'captured':<16} {captured.forecast}")
    if captured.forecast.peak <= machine.budget:
        return captured
    in_slices = slice_microbatches(trace, machine)
    # In slices first: what is streamed comes least often then.
    for order in (trace,) if in_slices is trace else (in_slices, trace):
        found = _search(captured if order is trace else _captured(order, machine), machine, passes, log, until)
        if found.forecast.peak <= machine.budget:
            return found
        lowest = min(lowest, found, key=lambda choice: choice.forecast.peak)
    text = explain_infeasible(lowest.forecast, machine, lowest.captured.trace)
    more = "" if solver.is_installed() else f"\n{solver.MISSING}: with it a smaller budget may do; {solver.INSTALL}"
    raise BudgetError(text + more, machine.budget, lowest.forecast.peak)


def _captured(trace: Trace, machine: Machine) -> PlanResult:
    """The step as it is."""
    check(trace)
    captured = predict(trace, machine)
    return PlanResult((), captured, captured)


def _search(best: PlanResult, machine: Machine, passes: tuple[Pass, ...], log: Log, until: float) -> PlanResult:
    """The fastest of the passes' plans with which the step fits; the one of the lowest peak, if none does."""
    trace, best, home_us = best.captured.trace, replace(best, greedy=not solver.is_installed()), 0.0
    for find in passes:
        fits, late = best.forecast.peak <= machine.budget, time.monotonic() >= until
        if fits and (not best.plan or best.gap <= GOOD_GAP):
            break
        if (late and (fits or find not in QUICK)) or (fits and _is_spared(find, best, home_us)):
            continue
        hurried = _hurried(find) if until < math.inf and find in QUICK and not fits else None
        found = _asked(hurried or find, trace, machine, until)
        best, home_us = _better(best, found, machine), max(home_us, found.no_offload_us)
        log(f"{find.__name__:<16} {best.forecast}")
    return best


def _is_spared(find: Pass, best: PlanResult, home_us: float) -> bool:
    """Whether a pass is not worth its time beside a plan that fits; `home_us`: what every plan adds that does without
    the far tier."""
    if find in WITHOUT_OFFLOAD and best.forecast.us < best.captured.us + home_us:
        return True
    is_far = any(isinstance(decision, Reload | Stream) for decision in best.plan)
    if find is cut_backward:  # where once does without the far tier, twice is hardly faster
        return best.is_single and not is_far
    if find is anneal:  # which is without the far tier, and proves nothing
        return best.is_single or is_far
    return find in SEARCHES and best.gap <= FAIR_GAP


def _hurried(find: Pass) -> Pass:
    """The quick pass, which does not look at the clock and simulates few ops."""
    down = greedy_plan if find is greedy_plan else greedy_plan_no_offload
    return lambda trace, machine, until: down(trace, machine, fine=QUICK_WORK)


def _asked(find: Pass, trace: Trace, machine: Machine, until: float) -> Proposal:
    found = find(trace, machine, until)
    if isinstance(found, Proposal):  # a search times its copies itself
        return found
    if not has_copies(found):
        return Proposal(found)
    return Proposal(retime_copies(ReuseGaps(trace), machine, found, predict(apply(trace, found), machine), until)[0])


def _better(best: PlanResult, proposal: Proposal, machine: Machine) -> PlanResult:
    """The better of the best so far and what was found: what fits before what does not, then what is faster, or what
    needs less; with all that is proven."""
    applied = apply(best.captured.trace, proposal.plan)
    check(applied)
    new = replace(best, plan=proposal.plan, forecast=predict(applied, machine))

    def rank(choice: PlanResult) -> tuple[bool, float, float]:
        over = choice.forecast.peak > machine.budget
        return over, choice.forecast.peak if over else choice.forecast.us, choice.forecast.peak

    bound_us, any_us = max(best.bound_us, proposal.bound_us), max(best.any_us, proposal.any_us)
    return replace(min(best, new, key=rank), bound_us=bound_us, any_us=any_us)
