"""A planned step that is ready to run, and what its runs measured.

loss = step(tensors)      a run begins: the forward half runs, and keeps what backward reads
loss.backward()           the backward half runs; see `autograd_function.py`
step.report, step.times   what the measured runs took
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from passes.concurrent_forwards import pending_gradient_nbytes
from passes.ir.ops import ACCUMULATE

from ..errors import MemgraphError, RecordingError
from ..graph.guard_ops import GuardFailed
from ..graph.opaque_ops import undoing_parts
from ..profile.memory_meter import Allocation, Meter, OutsideMeter, meter_of
from ..profile.step_timer import StepTimes, WallTimes
from ..report.report import Report
from ..report.report_data import Assumption, OpaqueRow
from ..system.user_warning import warn_user
from .arena import StepArena
from .autograd_function import Differentiation, OtherOutputs, StepFunction
from .concurrent_runs import held_nbytes
from .cuda_graphs import CudaGraphPair, Recorder
from .out_of_memory import explain_out_of_memory
from .step_history import StepHistory, forward_backward_us
from .step_parts import StepParts
from .step_run import PlacedRun, StepRun
from .undo import restoring_generators

MANY = 8  # from so many open forwards on, one warning covers larger numbers


OUTSIDE = 0  # of `warned`: the caller's own work needs no further warning


class Step:
    """The step of one signature.

    The first run is measured in bytes, the second in time: a meter slows short ops down, and a first run loads
    kernels.  Then `replan` may return a better step.  Later runs are timed as a whole; when their times leave the
    forecast, the plan is looked at again (`step_history.py`).
    """

    def __init__(
        self,
        parts: StepParts,
        report: Report,
        *,
        replan: Callable[[Step, StepTimes | None], Step] | None = None,
        on_measured: Callable[[Step], None] = lambda step: None,
        history: StepHistory | None = None,
        warned: Collection[int] = (),
    ) -> None:
        """
        Args:
            replan: plans with the measured times of ops, and returns this step or one to take its place; without
                times, a step of the same plan that compiles fewer ops as one.
            on_measured: called when bytes of the step were measured, while its gradients exist.
            history: of the step whose place this one takes, if it takes one's place.
            warned: the numbers of open forwards that need no further warning.
        """
        self.parts = parts
        self.report = report
        self.device = torch.device(report.machine.device)
        self.history = history or StepHistory()
        self.times: StepTimes | None = None
        self.cuda_graphs = parts.recording.cache
        self.arena: StepArena | None = None
        self.warned = set(warned)
        self._replan, self._on_measured = replan, on_measured
        self._replan_due = replan is not None and history is None
        self.failures: Counter[int] = Counter()  # of guards, by number
        self._held = 0  # bytes behind forward, when it was measured
        self._forwards_measured = 0  # the most forwards that were open when one of them was measured

    def __call__(
        self, tensors: Sequence[Tensor], other_outputs: Callable[[], OtherOutputs], floats: Sequence[float] = ()
    ) -> list[Tensor]:
        """Return the module's tensor outputs, given its parameters, buffers and inputs, and the floats that ops read.

        Raises:
            GuardFailed: a value differs from that of the capture. Nothing has changed.
        """
        if not self.parts.captured.guards:
            return self._run(tensors, other_outputs, floats)
        try:
            with restoring_generators(self.parts.generators, self.parts.draws_on_host), undoing_parts():
                return self._run(tensors, other_outputs, floats)
        except GuardFailed as failure:
            self.failures[failure.guard] += 1
            raise GuardFailed(failure.guard, failure.actual, self.parts.captured.guards) from None

    def _run(
        self, tensors: Sequence[Tensor], other_outputs: Callable[[], OtherOutputs], floats: Sequence[float]
    ) -> list[Tensor]:
        """Run forward.

        A measured run counts all that is allocated here, also to prepare it; not the numbers that ranks compare.
        """
        others = self.parts.open_runs(tensors)
        meter = self._meter(len(others))
        with _window(meter):
            run = self._begin(tensors, meter, others)
            run.floats = floats
            if self.parts.captured.blocks:
                run.in_blocks = self.parts.inputs_in_blocks
        run.rank_check, run.compare_guards = self.parts.rank_check.begin(), self.parts.rank_check.compare_guards
        if run.gather is not None:
            run.check_ranks()
        differentiable = self.parts.halves.backward is not None
        try:
            with _window(meter):
                if run.gather is not None:
                    run.gather.open()
                if not differentiable:
                    return run.forward(tensors, self.parts.roles.outputs)
                context = Differentiation(self.parts, self.report, run, self.finish, other_outputs())
                given = self.parts.without_cut_off(tensors)
                outputs = list(StepFunction.apply(context, *given))  # type: ignore[no-untyped-call]
            self._begin_outside(run)
            return outputs
        finally:
            if not differentiable:
                self.finish(run)

    def _begin_outside(self, run: StepRun) -> None:
        """Measure what the caller allocates until backward; on a GPU once, since that resets the caller's counters."""
        allocated = run.meter.allocated() if run.meter is not None else None
        if allocated is not None:
            resident = self.report.resident_nbytes(run.absent_nbytes, run.states_nbytes)
            self._held = resident + allocated.net - run.replaced_nbytes
        is_measured = allocated is not None or self.device.type == "cpu"
        if self._held and is_measured and not run.is_concurrent and OUTSIDE not in self.warned:
            run.outside, run.held_nbytes = OutsideMeter(self.device), self._held
            run.note_outside = partial(self.warned.add, OUTSIDE)

    def _meter(self, others: int) -> Meter | None:
        """Return a meter for the first run, and once that was timed, for the first beside so many others."""
        is_first = self.report.measured is None or (self.times is not None and self._forwards_measured <= others)
        return meter_of(self.device) if is_first else None

    def _begin(self, tensors: Sequence[Tensor], meter: Meter | None, others: Sequence[StepRun]) -> StepRun:
        """Return a run whose state is in place, with its meter, clock or watch."""
        run = self._prepare(tensors, others)
        run.caller_inputs, run.meter = self.parts.roles.varying, meter
        if others:
            self._note_concurrent(run, others, tensors)
        if meter is not None:
            self._forwards_measured = len(others) + 1
            run.absent_nbytes = self.parts.absent_nbytes(tensors)
            if self.parts.state_slots is not None:
                run.replaced_nbytes = self.parts.state_slots.placement.take_left_nbytes()
            fused = self.parts.fused_update
            run.states_nbytes = fused.states_nbytes() if fused is not None else None
        elif self.times is None:
            run.time(self.device)
        else:
            run.placed = self._placed() if not others and run.recording is None else None
            if run.placed is None or run.placed.is_ordinary:
                run.wall = WallTimes(self.device)
        if run.placed is None and self.arena is not None:
            self.arena.end()
        return run

    def _prepare(self, tensors: Sequence[Tensor], others: Sequence[StepRun]) -> StepRun:
        """Bring state to its slots and open a run; if that fails, tell the other ranks.

        Beside other open runs autograd sums the gradients, which stay where they are.
        """
        tier, slots, sharded = self.parts.tier, self.parts.state_slots, self.parts.sharded_grads
        try:
            if slots is not None:
                places = slots.place(tensors, [saved for run in others for saved in run.saved_tensors()])
                if not others:
                    slots.offload_gradients(self.parts.roles.owners_of_gradients(tensors))
                if tier is not None:
                    tier.bind(places)
            if sharded is not None:
                sharded.drop_cleared()  # frees shards whose gradients are gone
            run = StepRun(self.parts.halves, tier, self._recording(tensors))
            if self.device.type != "cpu":
                run.explain_errors = partial(explain_out_of_memory, self.report, self.device)
        except MemgraphError:
            self.parts.rank_check.announce_failure()
            raise
        if self.parts.pending_gathers is not None:
            run.gather = self.parts.pending_gathers.begin_forward(self.parts.captured, tensors)
        return run

    def _note_concurrent(self, run: StepRun, others: Sequence[StepRun], tensors: Sequence[Tensor]) -> None:
        """Note what other open forwards hold, and warn if all together may exceed the budget."""
        run.others_nbytes = held_nbytes(others, tensors)
        trace, budget, count = self.report.forecast.trace, self.report.budget, len(others) + 1
        adds = self.parts.roles.adds and any(op.fn == ACCUMULATE for op in trace.ops)
        # Autograd sums the gradients of several forwards on the device, those that a plan offloads as well.
        gradients = pending_gradient_nbytes(self.report.choice.captured.trace) * (2 if adds else 1)
        together = self.report.peak - trace.other_nbytes + run.others_nbytes + gradients
        if together > budget and min(count, MANY) not in self.warned:
            self.warned.add(min(count, MANY))
            warn_user(
                f"{count} forwards are open at once, and may take {together} bytes together, over the budget of "
                f"{budget}; {_advice(count, trace.other_nbytes > 0)}"
            )
        most = max(self.report.together, together)
        self.report = replace(self.report, forwards=max(self.report.forwards, count), together=most)

    def _recording(self, tensors: Sequence[Tensor]) -> CudaGraphPair | None:
        """Return the recording to replay, once the step has run op by op and was measured."""
        if self.cuda_graphs is None or self.report.measured is None or self.times is None:
            return None
        try:
            return self.cuda_graphs.ready(tensors, self._record)
        except RecordingError as error:
            if self.parts.recording.is_required:
                raise
            self.cuda_graphs, self.report = None, replace(self.report, recorded=f"not recorded: {error}")
            return None

    def _placed(self) -> PlacedRun | None:
        """Return the run in this step's arena, which it has if torch's allocator held more than the budget.

        A step that is recorded has none, because the recording would be made beside the arena's block.
        """
        if self.report.held <= self.report.budget or self.cuda_graphs is not None:
            return None
        if self.arena is None:
            self.arena = StepArena(self.parts.halves, self.device, self.report.budget, self.parts.has_collectives)
        return self.arena.begin()

    def _record(self, tensors: Sequence[Tensor], recorder: Recorder) -> CudaGraphPair:
        roles = self.parts.roles
        return CudaGraphPair(self.parts.halves, self.parts.tier, tensors, roles.varying, roles.outputs, recorder)

    def release_memory(self) -> None:
        """Free what a recording or an arena keeps between runs, which another step needs."""
        if self.cuda_graphs is not None:
            self.cuda_graphs.end()
        if self.arena is not None:
            self.arena.end()

    def finish(self, run: StepRun) -> None:
        """Close a run, and note what it took if it was measured."""
        wall = run.wall_times if run.halves is self.parts.halves else None
        if wall is not None:
            due = self.history.add(wall)
            self.history.compare(self.forecast_us)
            if due:
                self._judge_plan()
        times = run.times()
        if times is not None:
            self._note_times(times)
        was_metered, ended = run.meter is not None, run.ended
        allocated = run.close()
        if allocated is not None:
            self._note_bytes(run, allocated)
        elif was_metered and ended:
            self.report = replace(self.report, unmeasured="a profiler was running, which takes the meter's place")

    def _note_times(self, times: StepTimes) -> None:
        if self.parts.fused_update is not None:
            waited = self.parts.fused_update.waited_us
            times = times.without({op: waited.get(name, 0.0) for op, name in self.parts.update_ops.items()})
        self.times, self.report = times, replace(self.report, measured_us=times.us)

    def _note_bytes(self, run: StepRun, allocated: Allocation) -> None:
        """Replace the report by one with the measured bytes; of several open forwards the largest counts."""
        several = f"{self.report.forwards} forwards were open at once" if run.is_concurrent else ""
        before = self.report.measured or 0
        report = replace(
            self.report, beyond=run.unplanned or several, blocks=allocated.blocks, held=allocated.held
        ).with_measured(allocated.peak + run.others_nbytes - run.replaced_nbytes, run.absent_nbytes, run.states_nbytes)
        if before <= (report.measured or 0):
            self.report = report
            self._warn_over()
        if self.parts.halves.backward is not None:
            self._on_measured(self)

    def note_update(self, nbytes: int, unplanned: str) -> None:
        """Note the bytes of the optimizer's update behind this step; `unplanned` says why they exceed the forecast."""
        report = self.report.with_update(nbytes)
        self.report = replace(report, beyond=report.beyond or unplanned)
        self._warn_over()

    def _warn_over(self) -> None:
        """Warn if a measured step took more than the budget, and no reason is known."""
        report = self.report
        if (report.measured or 0) > report.budget and not report.beyond:
            warn_user(
                f"a measured step took {report.measured} bytes, over its budget of {report.budget}, and its forecast "
                f"is {report.peak}, which should not be: please report it with `print(model.plan)`"
            )

    def without_replan(self) -> Step:
        """Return this step, which keeps its plan: that of another length has been looked at."""
        self._replan, self._replan_due = None, False
        return self

    def without_other_outputs(self, needed_nbytes: int) -> Step:
        """Return this step, whose backward starts from scalars alone; from all outputs it needs more bytes."""
        self.report = replace(self.report, all_outputs=needed_nbytes)
        return self

    def note_assumptions(self, assumptions: Iterable[Assumption]) -> None:
        """Note what the step rests on besides values of tensors."""
        self.report = replace(self.report, assumptions=tuple(assumptions))

    def _judge_plan(self) -> None:
        """Time the ops of the next run for a new plan, if the latest steps call for it."""
        if self._replan is None or self._replan_due or self.times is None or self.cuda_graphs is not None:
            return
        report = self.report
        plain_us = report.choice.captured.us
        if report.plan and self.history.calls_for_look(self.forecast_us, self.times.us, plain_us, report.planned_us):
            self._replan_due, self.times, self.history = True, None, self.history.after_look()

    @property
    def forecast_us(self) -> float:
        """Forecast microseconds of forward and backward."""
        updates = self.parts.fused_update is not None
        return forward_backward_us(self.report.forecast, updates)

    @property
    def current_report(self) -> Report:
        """The report, with the times of the latest steps."""
        report = self._with_guards() if self.parts.captured.guards else self.report
        if self.arena is not None:
            report = report.in_arena(self.arena.why_not, self.arena.taken)
        median_us = self.history.median_us
        if median_us is None:
            return report
        return replace(report, recent_us=median_us, expected_us=self.forecast_us, slower=self.history.slower)

    def _with_guards(self) -> Report:
        """Return the report with what the step rests on."""
        captured = self.parts.captured
        assumptions = tuple(
            Assumption(guard.assumption, guard.where, self.failures[guard.number])
            for guard in captured.guards[: len(captured.guards) - len(captured.opaque)]
        )
        rows = tuple(
            OpaqueRow(part.path, type(part.module).__name__, part.nbytes, part.reason, self.failures[part.guard])
            for part in captured.opaque
        )
        return replace(self.report, assumptions=(*self.report.assumptions, *assumptions), opaque=rows)

    @property
    def needs_replan(self) -> bool:
        """Return True if times of ops are known, with which no plan was made yet, or compiled ops took too much."""
        return self._is_over or (self._replan_due and self.times is not None)

    @property
    def _is_over(self) -> bool:
        return self._replan is not None and self.report.is_over_by_regions

    def replanned(self) -> Step:
        """Return this step, or one with a better plan to take its place; plans once for each measurement."""
        if not self.needs_replan or self._replan is None:
            return self
        if self._is_over:
            return self._replan(self, None)
        self._replan_due = False
        return self._replan(self, self.times)

    def replaced_by(self, parts: StepParts, report: Report, replan: Callable[[Step, StepTimes | None], Step]) -> Step:
        """Return the step with a better plan that takes this one's place, and continues its history."""
        parts = replace(parts, accumulated_plan=self.parts.accumulated_plan)
        history = StepHistory(self.history.looks, self.history.steps)
        report = report.after(self.report)
        step = Step(parts, report, replan=replan, on_measured=self._on_measured, history=history, warned=self.warned)
        self.release_memory()
        if self.parts.state_slots is not None:
            self.parts.state_slots.release_to(parts.state_slots)
        return step

    def note_repriced(self, us: float) -> None:
        """Note the forecast of the same plan at measured prices, in microseconds."""
        self.report = replace(self.report, repriced_us=us)


def _window(meter: Meter | None) -> AbstractContextManager[None]:
    return meter.window() if meter is not None else nullcontext()


def _advice(count: int, is_planned: bool) -> str:
    if is_planned:
        return "with gradients set to None before them, and forwards= for as many as are open, they keep it"
    if count < MANY:
        return f"with forwards={count} they are planned to keep it"
    return "a forward that never has a backward belongs under torch.no_grad()"
