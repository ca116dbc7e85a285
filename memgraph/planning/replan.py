"""Plan a step again with the times that its ops took inside the step, if another plan is then faster.

forecast 40 ms with ops timed alone, 55 ms with times of the step; another plan takes 50 ms   ->   that plan

The prices of ops, links and casts as they were measured inside a running step.

mm: 10 us timed alone, 14 us inside the step beside copies to the tier   ->   mm: 14 us
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from passes import BudgetError, Machine, Op, PlanResult, Trace, apply, predict
from passes.ir.machine import Tier
from passes.ir.ops import NARROW, OFFLOAD, RELOAD, WIDEN
from passes.schedule.tier_choice import with_held_tiers

from ..errors import RecordingError
from ..optim.offloaded_update import OffloadedUpdate
from ..options.compile_options import CompileOptions
from ..profile.step_timer import StepTimes
from ..report.tables import mb
from ..runtime.step import Step
from .assembly import AssembledStep
from .lowering.lowering import NotLowered
from .plan_cache import is_final, remember
from .progress import Progress
from .search import PlanSearch

Search = Callable[[Trace, Machine], PlanResult]

WORTH = 0.02  # of the step's time: the least that a new plan has to save
INTERRUPTED = 5.0  # times the median: up to that, an op that allocates much may wait for new pages
STARTS = (OFFLOAD, RELOAD)  # ops that begin a copy, and wait for none


@dataclass(frozen=True, eq=False)
class Replanner:
    """Plans a step again once its ops were timed inside it.

    Attributes:
        assemble: makes the step of a plan, given the machine, the plan's result, when planning began, and maybe why
            nothing is compiled as one.
        plain: the trace that the first plan was made for.
        lowering: the compiled segments of the step that was timed.
        update: its copies run beside the step's.
    """

    options: CompileOptions
    assemble: Callable[..., AssembledStep]
    plain: Trace
    lowering: NotLowered
    update: OffloadedUpdate

    def __call__(self, step: Step, times: StepTimes | None) -> Step:
        """Return a step with a better plan, or the same step; without times, the same plan with regions in segments.

        A replaced step's tier is not closed here: it closes itself when its last run ends.
        """
        began = time.perf_counter()
        choice, machine = step.report.choice, step.report.machine
        if times is None:
            split = f"measured {mb((step.report.measured or 0) - step.report.peak)} over the forecast"
            return self._replaced(step, self.assemble(machine, choice, began, split))
        times = self.lowering.split_times(times)
        trace, measured = with_measured_times(choice, machine, times.beside(self.update.copies))
        step.note_repriced(predict(apply(trace, choice.plan), measured).us)
        key = self.plain, machine, self.options.search_key
        is_kept = step.history.is_untouched and is_final(*key)
        if not choice.plan or self.options.plans or is_kept:
            return step
        trace = with_held_tiers(trace, choice.plan, machine)
        with Progress() as progress:
            search = PlanSearch(self.options, progress, time.monotonic() + self.options.planning_s())
            better = replanned(choice, trace, measured, search.search)
        remember(*key, better or choice, final=True)
        if better is None:
            return step
        try:
            assembled = self.assemble(measured, better, began)
        except RecordingError:
            return step
        return self._replaced(step, assembled)

    def _replaced(self, step: Step, assembled: AssembledStep) -> Step:
        return step.replaced_by(assembled.parts, assembled.report, replace(self, lowering=assembled.lowering))


def replanned(choice: PlanResult, trace: Trace, machine: Machine, search: Search) -> PlanResult | None:
    """Return a plan of `search` that is faster by `WORTH`; None if there is none.

    `trace` and `machine` have the prices measured inside the step, and forecast both plans.
    """
    enough = (1 - WORTH) * predict(apply(trace, choice.plan), machine).us
    if predict(trace, machine).us >= enough:  # no plan is faster than the step without one
        return None
    try:
        better = search(trace, machine)
    except BudgetError:  # with other prices the search takes another way, which may end without a plan
        return None
    return better if predict(better.forecast.trace, machine).us < enough else None


def with_measured_times(choice: PlanResult, machine: Machine, times: StepTimes) -> tuple[Trace, Machine]:
    """Return the captured step with the measured price of each op, and the machine with the measured links.

    Links are timed with everything else that the machine does at the same time, so ops get their share of that load.
    """
    ran = choice.forecast.trace
    cast = machine.cast
    narrow, widen = _cast_rate(ran, times, NARROW) or cast.out, _cast_rate(ran, times, WIDEN) or cast.back
    links = [_with_rates(tier, machine.device, times) for tier in (Tier(machine.tier, machine.link), *machine.behind)]
    machine = replace(machine, link=links[0].link, behind=tuple(links[1:]), cast=replace(cast, out=narrow, back=widen))
    usual = reprice(choice.captured.trace, ran, times)
    return _slower(usual, _load(ran, usual, machine, times)), machine


def _with_rates(tier: Tier, device: str, times: StepTimes) -> Tier:
    """Return a tier with the measured rates of its link; those of a direction without copies stay."""
    link, in_memory = tier.link, tier.name == "host" and device == "cpu"
    out, back = times.rates(link.half_duplex, in_memory)
    # The measured times of ops already contain what copies beside them cost.
    return replace(tier, link=replace(link, out=out or link.out, back=back or link.back, us_per_byte=0.0))


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
