"""Plan a step again, if what its ops take in the step itself, and not each for itself, makes another plan worth it.

forecast 40 ms with prices of the ops alone, 55 ms with those of the step; another plan takes 50 ms  ->  that one
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace

from passes import BudgetError, Machine, Op, PlanResult, Trace, apply, predict
from passes.ir.ops import NARROW, OFFLOAD, RELOAD, WIDEN

from ..profile.step_timer import StepTimes

Search = Callable[[Trace, Machine], PlanResult]

INTERRUPTED = 5.0  # times the median: new pages take an op of much memory up to that
STARTS = (OFFLOAD, RELOAD)  # ops that begin a copy, and wait for none
WORTH = 0.02  # of the step's time: what a new plan has to save


def replanned(choice: PlanResult, trace: Trace, machine: Machine, search: Search) -> PlanResult | None:
    """A plan of `search` that saves so much of the step; None if there is none.

    `trace` and `machine` have the prices of the step itself, with which both plans are forecast.
    """
    enough = (1 - WORTH) * predict(apply(trace, choice.plan), machine).us
    if predict(trace, machine).us >= enough:  # no plan is faster than the step as it is
        return None
    try:
        found = search(trace, machine)
    except BudgetError:  # prices lead the search, which may end elsewhere
        return None
    return found if predict(found.forecast.trace, machine).us < enough else None


def with_measured_times(choice: PlanResult, machine: Machine, times: StepTimes) -> tuple[Trace, Machine]:
    """The step as it was captured, with the price of each op in it, and the machine with the links as they were.

    Links are timed with whatever else the machine does meanwhile.  So the ops are given their share of that.
    """
    ran = choice.forecast.trace
    link, cast = machine.link, machine.cast
    out, back = (found or known for found, known in zip(times.rates, (link.out, link.back), strict=True))
    narrow, widen = _cast_rate(ran, times, NARROW) or cast.out, _cast_rate(ran, times, WIDEN) or cast.back
    # Its ops took what they did beside the copies.
    link = replace(link, out=out, back=back, us_per_byte=0.0)
    machine = replace(machine, link=link, cast=replace(cast, out=narrow, back=widen))
    usual = reprice(choice.captured.trace, ran, times)
    return _slower(usual, _load(ran, usual, machine, times)), machine


def _load(ran: Trace, usual: Trace, machine: Machine, times: StepTimes) -> float:
    """Factor by which all ops together took longer than usual, as other processes interrupted some of them.

    Which ones is chance, but for those that begin a copy: they wake a thread, and are interrupted then.  So the
    sum is spread over all ops.  The longest interruption is left out, as even an idle machine has one now and then.
    """
    total, late = 0.0, [0.0]
    for op in ran.ops:
        source = usual.op.get(op.recomputes or op.name)
        if op.name in times.ops and op.fn in STARTS:
            late.append(max(0.0, times.ops[op.name] - machine.link.call_us))
        elif op.name in times.ops and source is not None and _computes(source):
            total += source.us
            late.append(times.ops[op.name] - source.us)
    return max(1.0, 1.0 + (sum(late) - max(late)) / total) if total else 1.0


def _slower(trace: Trace, load: float) -> Trace:
    """The same step on a machine under load."""
    ops = (replace(op, us=round(load * op.us, 1)) if _computes(op) else op for op in trace.ops)
    return replace(trace, ops=tuple(ops))


def _cast_rate(ran: Trace, times: StepTimes, fn: str) -> float:
    """Bytes per microsecond of the casts of one direction, by what they are before and after both; 0.0 without any."""
    casts = [op for op in ran.ops if op.fn == fn and op.name in times.ops]
    wide = sum(ran.nbytes[(op.holds if fn == WIDEN else ran.op[op.reads[0]].holds)[0]] for op in casts)
    us = sum(times.ops[op.name] for op in casts)
    return wide / us if us else 0.0


def reprice(captured: Trace, ran: Trace, times: StepTimes) -> Trace:
    """`captured` with the time that each op took while `ran` ran.

    Ops that are alike take what they took on average, those that ran again included: one flight is too little to tell
    layers apart, and a price that chance made would be taken for a difference.  What took far longer than the others
    was interrupted.
    """
    first = {op.name: op for op in captured.ops}
    seen: defaultdict[Hashable, list[float]] = defaultdict(list)
    for op in ran.ops:
        source = first.get(op.recomputes or op.name)
        if source is not None and op.name in times.ops:
            seen[_kind(source)].append(times.ops[op.name])

    def price(op: Op) -> Op:
        found = seen.get(_kind(op))
        return replace(op, us=round(_usual(found), 1)) if found and _computes(op) else op

    return replace(captured, ops=tuple(map(price, captured.ops)))


def _usual(times: list[float]) -> float:
    most = INTERRUPTED * statistics.median(times)
    return statistics.fmean(us for us in times if us <= most)


def _kind(op: Op) -> Hashable:
    """Ops of the same kind were priced alike; an update is of its own kind, which takes what its parameter does."""
    own = op.name if op.phase == "update" else ""
    return own, op.fn, op.type, op.us, op.workspace, tuple(made.nbytes for made in op.makes), len(op.reads)


def _computes(op: Op) -> bool:
    return not op.is_input and (op.us > 0 or bool(op.makes) or op.phase == "update")
