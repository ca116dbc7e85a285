"""The prices of ops, links and casts as they were measured inside a running step.

mm: 10 us timed alone, 14 us inside the step beside copies to the tier   ->   mm: 14 us
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace

from passes import Machine, Op, PlanResult, Trace
from passes.ir.ops import NARROW, OFFLOAD, RELOAD, WIDEN

from ..profile.step_timer import StepTimes

INTERRUPTED = 5.0  # times the median: up to that, an op that allocates much may wait for new pages
STARTS = (OFFLOAD, RELOAD)  # ops that begin a copy, and wait for none


def with_measured_times(choice: PlanResult, machine: Machine, times: StepTimes) -> tuple[Trace, Machine]:
    """Return the captured step with the measured price of each op, and the machine with the measured links.

    Links are timed with everything else that the machine does at the same time, so ops get their share of that load.
    """
    ran = choice.forecast.trace
    link, cast = machine.link, machine.cast
    rates = times.rates(link.half_duplex)
    out, back = (rate or known for rate, known in zip(rates, (link.out, link.back), strict=True))
    narrow, widen = _cast_rate(ran, times, NARROW) or cast.out, _cast_rate(ran, times, WIDEN) or cast.back
    # The measured times of ops already contain what copies beside them cost.
    link = replace(link, out=out, back=back, us_per_byte=0.0)
    machine = replace(machine, link=link, cast=replace(cast, out=narrow, back=widen))
    usual = reprice(choice.captured.trace, ran, times)
    return _slower(usual, _load(ran, usual, machine, times)), machine


def _load(ran: Trace, usual: Trace, machine: Machine, times: StepTimes) -> float:
    """Return the factor by which all ops together were slower than usual, since other processes interrupted some.

    Which ops are interrupted is chance, except for those that begin a copy: they wake a thread, and are interrupted
    then.  So the sum is spread over all ops.  The longest interruption is left out; even an idle machine has one.
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
    ops = (replace(op, us=round(load * op.us, 1)) if _computes(op) else op for op in trace.ops)
    return replace(trace, ops=tuple(ops))


def _cast_rate(ran: Trace, times: StepTimes, fn: str) -> float:
    """Return the uncast bytes per microsecond of all casts in one direction; 0.0 without any."""
    casts = [op for op in ran.ops if op.fn == fn and op.name in times.ops]
    wide = sum(ran.nbytes[(op.holds if fn == WIDEN else ran.op[op.reads[0]].holds)[0]] for op in casts)
    us = sum(times.ops[op.name] for op in casts)
    return wide / us if us else 0.0


def reprice(captured: Trace, ran: Trace, times: StepTimes) -> Trace:
    """Return `captured` with the time that each op took while `ran` ran.

    Ops of one kind get their mean, recomputed ones included.  One run is too little to tell layers apart, and a plan
    would take chance for a difference.  Times far above the others were interrupted, and are left out.
    """
    first = {op.name: op for op in captured.ops}
    by_kind: defaultdict[Hashable, list[float]] = defaultdict(list)
    for op in ran.ops:
        source = first.get(op.recomputes or op.name)
        if source is not None and op.name in times.ops:
            by_kind[_kind(source)].append(times.ops[op.name])

    def price(op: Op) -> Op:
        measured = by_kind.get(_kind(op))
        return replace(op, us=round(_usual(measured), 1)) if measured and _computes(op) else op

    return replace(captured, ops=tuple(map(price, captured.ops)))


def _usual(times: list[float]) -> float:
    most = INTERRUPTED * statistics.median(times)
    return statistics.fmean(us for us in times if us <= most)


def _kind(op: Op) -> Hashable:
    """Ops of one kind were priced alike; each update is a kind of its own, with the time of its parameter."""
    own = op.name if op.phase == "update" else ""
    return own, op.fn, op.type, op.us, op.workspace, tuple(storage.nbytes for storage in op.makes), len(op.reads)


def _computes(op: Op) -> bool:
    return not op.is_input and (op.us > 0 or bool(op.makes) or op.phase == "update")
