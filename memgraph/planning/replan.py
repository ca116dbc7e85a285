"""Plan a step again with the times that its ops took inside the step, if another plan is then faster.

forecast 40 ms with ops timed alone, 55 ms with times of the step; another plan takes 50 ms   ->   that plan
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from passes import BudgetError, Machine, Op, PlanResult, Trace, apply, predict
from passes.simulate.forecast import OFFLOAD

from ..errors import RecordingError
from ..optim.offloaded_update import OffloadedUpdate
from ..options.compile_options import CompileOptions
from ..profile.step_timer import StepTimes
from ..runtime.step import Step
from .assembly import AssembledStep
from .lowering import NotLowered
from .plan_cache import is_final, remember
from .progress import Progress
from .search import PlanSearch

Search = Callable[[Trace, Machine], PlanResult]
Assemble = Callable[[Machine, PlanResult, float], AssembledStep]

INTERRUPTED = 5.0  # times the median: new pages take an op of much memory up to that
STARTS = (OFFLOAD, "memgraph.reload.default")  # ops that begin a copy, and wait for none
WORTH = 0.02  # of the step's time: what a new plan has to save


@dataclass(frozen=True, eq=False)
class Replanner:
    """Plans a step again once its ops were timed inside it.

    Attributes:
        assemble: makes the step of a plan, given the machine and when planning began.
        plain: the trace that the first plan was made for.
        lowering: the compiled segments of the step that was timed.
        update: its copies run beside the step's.
    """

    options: CompileOptions
    assemble: Assemble
    plain: Trace
    lowering: NotLowered
    update: OffloadedUpdate

    def __call__(self, step: Step, times: StepTimes) -> Step:
        """Return a step with a better plan, or the same step.

        A replaced step's tier is not closed here: it closes itself when its last run ends.
        """
        began = time.perf_counter()
        choice, machine = step.report.choice, step.report.machine
        times = self.lowering.split_times(times)
        trace, measured = with_measured_times(choice, machine, times.beside(self.update.copies))
        step.note_repriced(predict(apply(trace, choice.plan), measured).us)
        key = self.plain, machine, self.options.search_key
        is_kept = step.history.is_untouched and is_final(*key)
        if not choice.plan or self.options.plans or is_kept:
            return step
        with Progress() as progress:
            search = PlanSearch(self.options, progress, time.monotonic() + self.options.time_limit)
            better = replanned(choice, trace, measured, search.search)
        remember(*key, better or choice, settled=True)
        if better is None:
            return step
        try:
            assembled = self.assemble(measured, better, began)
        except RecordingError:
            return step
        return step.replaced_by(assembled.parts, assembled.report, replace(self, lowering=assembled.lowering))


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
    out, back = (found or known for found, known in zip(times.rates, (machine.out, machine.back), strict=True))
    narrow, widen = _cast_rate(ran, times, "narrow") or machine.narrow, _cast_rate(ran, times, "widen") or machine.widen
    # Its ops took what they did beside the copies.
    machine = replace(machine, out=out, back=back, drag=0.0, narrow=narrow, widen=widen)
    usual = reprice(choice.captured.trace, ran, times)
    return _slower(usual, _load(ran, usual, machine, times)), machine


def _load(ran: Trace, usual: Trace, machine: Machine, times: StepTimes) -> float:
    """Factor by which all ops together took longer than usual, as other processes interrupted some of them.

    Which ones is chance, but for those that begin a copy: they wake a thread, and are interrupted then.  So the
    sum is spread over all ops.  The longest interruption is left out, as even an idle machine has one now and then.
    """
    total, late = 0.0, [0.0]
    for op in ran.ops:
        source = usual.op.get(op.again or op.name)
        if op.name in times.ops and op.fn in STARTS:
            late.append(max(0.0, times.ops[op.name] - machine.call))
        elif op.name in times.ops and source is not None and _computes(source):
            total += source.us
            late.append(times.ops[op.name] - source.us)
    return max(1.0, 1.0 + (sum(late) - max(late)) / total) if total else 1.0


def _slower(trace: Trace, load: float) -> Trace:
    """The same step on a machine under load."""
    ops = (replace(op, us=round(load * op.us, 1)) if _computes(op) else op for op in trace.ops)
    return replace(trace, ops=tuple(ops))


def _cast_rate(ran: Trace, times: StepTimes, verb: str) -> float:
    """Bytes per microsecond of the casts of one direction, by what they are before and after both; 0.0 without any."""
    casts = [op for op in ran.ops if op.fn == f"memgraph.{verb}.default" and op.name in times.ops]
    wide = sum(ran.nbytes[(op.holds if verb == "widen" else ran.op[op.reads[0]].holds)[0]] for op in casts)
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
        source = first.get(op.again or op.name)
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
