"""A module's call -> the step that will run it: capture, summarize, plan, rewrite, split.

This page is the table of contents of the whole: each line of `Planner.step` is one room.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx, nn
from torch.nn.parameter import is_lazy

import passes
from passes import Machine, Plan, PlanResult, Stream, Trace, apply, make_plan, predict
from passes.concurrent_forwards import as_it_is_nbytes, plan_forwards
from passes.cuda_graph_memory import add_replay_memory
from passes.order.comm_order import place_collectives, sequence

from ..capture.capture import OutputSelector
from ..capture.explain_errors import refuse_hooks
from ..errors import CaptureError, RecordingError
from ..graph.accumulate_grads import accumulate_grads
from ..graph.captured import Captured
from ..graph.partition import partition
from ..graph.rewrite import fake_mode, rewrite
from ..graph.summarize import summarize
from ..guards.signature import has_gradients, parameters_with_grad_hooks
from ..microbatch.advice import suggest_microbatches
from ..optim.fused_update import FusedUpdate
from ..optim.offloaded_update import OffloadedStates, OffloadedUpdate
from ..optim.placement import StatePlacement
from ..optim.state_parts import TrainedParameters
from ..optim.tier_slots import OffloadedSlots, tier_slots, unread_parameters
from ..optim.update_cost import add_update, parameter_values, price_update
from ..options.compile_options import CompileOptions
from ..oss import OSS
from ..oss.comm.consensus import NEW, announce_failure, announcing_failure, check_same_step, digest
from ..oss.compiled.bandwidth import measure_network
from ..oss.compiled.joint_planning import JointPlanner
from ..oss.compiled.step_memory import add_sharded_update, offloaded_nbytes
from ..profile.correct_fakes import apply_profiled_layouts
from ..profile.library_workspaces import add_library_workspaces, libraries_nbytes
from ..profile.link_bandwidth import sizes_of
from ..profile.machine_profile import measure_links
from ..profile.memory_meter import resident_bytes
from ..profile.op_profiler import OpProfiler, room_nbytes
from ..profile.page_faults import page_faults_us
from ..profile.step_timer import StepTimes
from ..report.report import Report
from ..report.reuse_plan import reuse_plan
from ..runtime.cuda_graph_checks import refuse_recording
from ..runtime.cuda_graphs import recorder_of
from ..runtime.measure_update import UpdateMeasurement
from ..runtime.released_outputs import search_with_released
from ..runtime.step import Step
from ..runtime.step_history import StepHistory
from ..storage.tiers import buffer_location, open_tier, tier_name
from ..system.byte_sizes import budget_nbytes
from ..system.device import device_of, hold_to, releasing_cached, return_freed_memory, unused_nbytes
from ..system.graph_sources import forgotten_sources
from ..system.locks import PLANNING_LOCK, capturing
from ..tensors.aliasing import shared_memory
from ..tensors.loss_outputs import select_update_roots
from .accumulated_step import AccumulatedStep, or_known, plan_accumulated, warn_accumulation, with_remaining_grads
from .budget_error import budget_error, has_time_left, smallest_budget
from .lowering import Lowering
from .param_groups import trained_by
from .plan_cache import find_plan, is_final, remember
from .progress import Progress
from .replan import replanned, with_measured_times
from .step_graph import captured_call, with_collectives, with_updates


class Planner:
    """Plans the steps of one module."""

    def __init__(self, module: nn.Module, options: CompileOptions) -> None:
        self.module = module
        self.options = options
        optimizer = options.optimizer
        self.sharded = optimizer if isinstance(optimizer, OSS) else None
        far = self.sharded.far if self.sharded is not None else None
        self.placement = StatePlacement(module)
        self.progress = Progress()
        self.update = far or OffloadedUpdate(optimizer, options.fuse_update, host_update=options.host_update)
        self._look()
        self.fused = (
            FusedUpdate(module, optimizer, self.update) if optimizer is not None and options.fuse_update else None
        )
        by_itself = optimizer is not None and not options.fuse_update
        self._first_update = UpdateMeasurement(optimizer, self.device) if optimizer is not None and by_itself else None

    def _look(self) -> None:
        """Where the module lies, and what that means for the budget and the far tier; it may be moved later."""
        owned = [*self.module.parameters(), *self.module.buffers()]
        if any(map(is_lazy, owned)):
            raise CaptureError("parameters have no shape yet: run the lazy module once before it is compiled")
        device = device_of(owned)
        if getattr(self, "device", None) != device:
            self.budget = budget_nbytes(self.options.budget, device, resident_bytes(owned))
            self.tier = tier_name(self.options.offload, device)
            if self.options.strict:
                hold_to(self.budget, device)
            self.recorder = recorder_of(device) if self.options.cuda_graphs else None
            self.placement.location = self.update.location = buffer_location(
                device, self.options.spill_dir, self.options.pinned
            )
            self.device = device

    def refuse_optimizer(self) -> None:
        """
        Raises:
            UpdateError: the optimizer is one with which no call can be planned.
        """
        if self.sharded is None:
            there = resident_bytes([*self.module.parameters(), *self.module.buffers()])
            # Without a far tier it is not the optimizer that keeps all on the device.
            self.update.check_fits_on_device(there, math.inf if self.tier is None else self.budget)

    def step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: OutputSelector, like: Step | None = None
    ) -> Step:
        """The step of this call, planned and ready; `like` is that of the same call when gradients were there, or were
        not.

        Raises:
            BudgetError: no plan fits the budget.
            CaptureError: the module can't be captured.
            PlanError: plans were given, and none is good for this call.
        """
        with PLANNING_LOCK, forgotten_sources(), releasing_cached(self.device), Progress() as self.progress:
            return self._step(args, kwargs, wanted, like)

    def priced(self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: OutputSelector) -> tuple[Trace, Machine]:
        """What this call's step is planned on: its text with prices, and the machine.

        Raises:
            CaptureError: the module can't be captured.
            FusedError: its loss is not in the step, and updates are to run in backward.
        """
        with PLANNING_LOCK, Progress() as self.progress:
            _, graph, trained = self._begun(args, kwargs, wanted)
            return self._price(graph, trained)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: OutputSelector, like: Step | None) -> Step:
        begin = time.perf_counter()
        captured, graph, trained = self._begun(args, kwargs, wanted, like)
        together, later = self._together(trained), self._later(captured, graph, trained)
        captured_s, until = time.perf_counter() - begin, time.monotonic() + self.options.time_limit
        self.progress.bound(until)
        try:
            machine, choice = self._plan(graph, trained, until, like.adding if like is not None else None)
        except passes.BudgetError as error:
            few = has_time_left(len(graph.nodes), captured_s, until)
            advised = partial(self._advised, captured=captured, args=args, kwargs=kwargs, wanted=wanted)
            needed = partial(self._smallest, later, trained, until) if later is not None else lambda: None
            raise budget_error(error, advised if few else lambda error: error, needed) from None
        found = self._adding(later, choice, trained, until) if later is not None and not self.options.plans else None
        step, plain = self._made(captured, graph, machine, choice, trained, begin), choice.captured.trace
        if found is not None:
            step.adding, step.report = found.plan, replace(step.report, adding=found.needed)
        if step.lowering is not None:
            choice = step.lowering.stated(choice, machine)
        step.report = replace(step.report, choice=choice, pages_us=page_faults_us(choice.forecast, machine))
        if together is None:
            step.again = step.replan = partial(self._again, graph, trained, plain)
        elif trained.shards or captured.gathers:  # and is not planned again, with times that differ from rank to rank
            step.meet = partial(self._meet, sequence(choice.forecast.trace))
            step.excuse = partial(announce_failure, together.exchange, self.device)
        return step

    def _begun(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: OutputSelector, like: Step | None = None
    ) -> tuple[Captured, fx.Graph, TrainedParameters]:
        """The call, captured, and the graph that is planned: it adds to gradients, and updates, if it is to."""
        with announcing_failure(self.sharded, self.module.parameters()):
            self._look()
            refuse_hooks(self.module)
            if self.sharded is not None:
                self.sharded.awaited.capturing(self.module.parameters())
            again = like is not None and self.fused is None and self.sharded is None
            self.progress.phase("capturing forward and backward")
            wanted = select_update_roots if self.fused else wanted
            call = self.module, args, kwargs, wanted, self.device
            captured = like.captured if like is not None and again else captured_call(*call)
            trained = trained_by(captured, self.module, self.options.optimizer, self.options.fuse_update)
            captured, trained = with_updates(captured, trained, self.module, self.fused)
            captured, trained = with_collectives(captured, trained, self.module, self.sharded)
        if (together := self._together(trained)) is not None:
            check_same_step(together.exchange, self.device, NEW)()
        adds = self.options.accumulate or has_gradients(self.module.parameters())
        graph = self._accumulating(captured) if adds else captured.graph.graph
        return captured, graph, trained

    def _made(
        self, captured: Captured, graph: fx.Graph, machine: Machine, choice: PlanResult, trained: TrainedParameters,
        begin: float,
    ) -> Step:  # fmt: skip
        """The step of a plan, ready to run."""
        planned = rewrite(graph, choice.forecast.trace)
        lowering = self._lowering(planned, choice.forecast.trace, self._prober(graph)) if self._lowers else None
        lowered, apart_us, refused = None, 0.0, 0
        if lowering is not None:
            planned, text = lowering.lowered(machine)
            refused = lowering.refused
            lowered, apart_us = predict(text, machine), predict(lowering.trace, machine).us
        its = tier_slots(planned, captured)
        tier = open_tier(self.device, [slot.nbytes for slot in its], self.options.spill_dir, self.options.pinned)
        if choice.plan and self.device.type == "cpu":
            return_freed_memory()
        report = Report(
            machine, choice, planned_us=(time.perf_counter() - begin) * 1e6, lowered=lowered, apart_us=apart_us,
            counted=self.options.optimizer is not None, uncompiled=refused,
        )  # fmt: skip
        home_slots = None
        if any(isinstance(decision, Stream) for decision in choice.plan) or any(slot.key for slot in its):
            states = OffloadedStates.of(self.update, choice.forecast.trace, trained.parts)
            home_slots = OffloadedSlots(self.placement, its, captured, states, unread_parameters(planned, captured))
        step = Step(captured, partition(planned, captured.graph), tier, report, home_slots)
        step.trained, step.landed, step.fused = trained.parameters, self._first_update, self.fused
        step.inside = self.sharded.inside if self.sharded is not None else None
        step.lowering = lowering
        if self.recorder is not None:
            refuse_recording(step, planned, self.recorder, self.options.cuda_graphs is True)
        return step

    def _again(self, graph: fx.Graph, trained: TrainedParameters, plain: Trace, step: Step, times: StepTimes) -> Step:
        """The step of a plan that is better, now that its times are known; the same step if there is none.

        Nobody closes the tier of the old one: it closes itself when its last flight has landed.
        """
        begin = time.perf_counter()
        choice = step.report.choice
        if step.lowering is not None:
            times = step.lowering.apart(times)
        trace, machine = with_measured_times(choice, step.report.machine, times.beside(self.update.copies))
        step.report = replace(step.report, repriced_us=predict(apply(trace, choice.plan), machine).us)
        known = plain, step.report.machine, self.options.search_key
        settled = step.recent.is_untouched and is_final(*known)
        if not choice.plan or self.options.plans or settled:  # a plan that was given is kept
            return step
        with Progress() as self.progress:
            found = replanned(choice, trace, machine, self._search)
        remember(*known, found or choice, settled=True)
        if found is None:
            return step
        try:
            new = self._made(step.captured, graph, machine, found, trained, begin)
        except RecordingError:
            return step
        new.replan, new.recent = step.replan, StepHistory(step.recent.looks, step.recent.steps)
        new.adding, new.warned, new.report = step.adding, step.warned, replace(new.report, adding=step.report.adding)
        if step.home_slots is not None:
            step.home_slots.release_to(new.home_slots)
        return new

    def _later(self, captured: Captured, graph: fx.Graph, trained: TrainedParameters) -> fx.Graph | None:
        """The graph of the same call when there are gradients to add to, if that is another one and may be met."""
        adds = graph is not captured.graph.graph or self.options.accumulate is False
        return None if adds or not trained.parameters or trained.updates else self._accumulating(captured)

    def _accumulating(self, captured: Captured) -> fx.Graph:
        """The graph that adds to gradients, but for those that autograd adds: of several open forwards, all."""
        alone = self.options.forwards == 1
        return accumulate_grads(
            captured, parameters_with_grad_hooks(self.module) if alone else dict(self.module.named_parameters())
        )

    def _adding(self, later: fx.Graph, choice: PlanResult, trained: TrainedParameters, until: float) -> AccumulatedStep:
        """What such a call needs; if no plan for it is found, that is said."""
        trace, machine = self._price(later, trained, until)
        tries = ((), choice.plan) if self.options.forwards == 1 else ()
        found = plan_accumulated(trace, machine, tries, partial(self._chosen, trained=trained, until=until))
        warn_accumulation(found, machine.budget)
        return found if tries else replace(found, plan=None)  # one forward alone may fit with what several do not

    def _meet(self, exchanged: str) -> Callable[[], None]:
        """Begin to ask whether all ranks are about to exchange this, and await the same."""
        assert self.sharded is not None
        known = digest(f"{exchanged}\n{sorted(self.sharded.awaited.buckets)}")
        return check_same_step(self.sharded.exchange, self.device, known)

    def _together(self, trained: TrainedParameters) -> JointPlanner | None:
        """The ranks that plan this step together, if there are others."""
        if self.sharded is None or self.sharded.exchange.is_alone or not trained.parameters:
            return None
        return JointPlanner(self.sharded.exchange, self.device)

    def _advised(
        self, error: passes.BudgetError, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any],
        wanted: OutputSelector,
    ) -> passes.BudgetError:  # fmt: skip
        if self.fused is not None:
            return error
        machine = Machine(self.budget, str(self.device))
        with capturing(self.module):
            return suggest_microbatches(error, self.module, args, kwargs, wanted, captured.graph.graph, machine)

    def _smallest(self, graph: fx.Graph, trained: TrainedParameters, until: float) -> int:
        return smallest_budget(lambda: self._plan(graph, trained, until)[1].forecast)

    def _plan(
        self, graph: fx.Graph, trained: TrainedParameters, until: float, known: Plan | None = None
    ) -> tuple[Machine, PlanResult]:
        trace, machine = self._price(graph, trained, until)
        return machine, self._chosen(trace, machine, trained, until, known)

    def _chosen(
        self, trace: Trace, machine: Machine, trained: TrainedParameters, until: float, known: Plan | None = None
    ) -> PlanResult:
        found = or_known(partial(self._found, until=until), known)
        search = partial(reuse_plan, self.options.plans) if self.options.plans else found
        together = self._together(trained)
        return together.choice(trace, machine, search) if together else search(trace, machine)

    def _search(self, trace: Trace, machine: Machine, until: float | None = None) -> PlanResult:
        until = time.monotonic() + self.options.time_limit if until is None else until
        self.progress.phase("planning, passes tried", len(passes.PASSES))
        search = partial(self._searched, until)
        if self.options.forwards > 1:  # while one of them runs, the caller has the outputs of the others
            return plan_forwards(trace, machine, self.options.forwards, search)
        return search_with_released(search, trace, machine)

    def _searched(self, until: float, trace: Trace, machine: Machine) -> PlanResult:
        return make_plan(trace, machine, log=self.progress.done, seconds=max(0.0, until - time.monotonic()))

    def _found(self, trace: Trace, machine: Machine, until: float) -> PlanResult:
        """The plan that was found for such a step before, or one that is searched for; always the latter for several
        open forwards, since no kept plan knows what the others hold."""
        search = partial(self._search, until=until)
        alone = self.options.forwards == 1
        return find_plan(trace, machine, self.options.search_key, search) if alone else search(trace, machine)

    def _price(self, graph: fx.Graph, trained: TrainedParameters, until: float = math.inf) -> tuple[Trace, Machine]:
        together = self._together(trained)
        machine = Machine(together.least(self.budget) if together else self.budget, str(self.device))
        bare = self._needs(summarize(graph), machine)
        if self.device.type == "cpu" and bare > self.budget:
            return_freed_memory()  # now, so that ops are timed as they will run in a step that needs a plan
        if together is not None and self.sharded is not None and (trained.shards or trained.gathers):
            machine = measure_network(machine, self.sharded, together)
        with together.telling() if together else nullcontext():
            libraries_nbytes(self.device)  # are there before anything is measured
            # A step that fits as it is needs no times; ranks that plan together do all alike.
            prober = self._prober(graph, until, times=bare > machine.budget or self._lowers or together is not None)
            self.progress.phase("pricing ops", len(graph.nodes))
            apply_profiled_layouts(graph, fake_mode(graph), prober.made)
            trace = add_library_workspaces(place_collectives(summarize(graph, prober), not machine.hides), self.device)
            trace = self._with_update(trace, graph, trained)
            trace = add_replay_memory(trace) if self.options.cuda_graphs is True else trace
            trace = (
                trace
                if together or self.options.plans
                else with_remaining_grads(trace, self.module, trained.parameters)
            )
        trace = together.trace(trace) if together else trace
        if self._needs(trace, machine) > machine.budget:
            trace = trace if prober.times else prober.timed(trace, graph)
            if self._lowers:
                trace = self._lowering(graph, trace, prober).shared()
            options, sizes = self.options, sizes_of(trace)
            with together.telling() if together else nullcontext():
                far = self.tier, self.device, options.spill_dir, sizes, options.wire_dtype, options.pinned
                machine = measure_links(machine, *far, prober.room)
                machine = self._with_homes(machine, trained)
            if machine.turns and machine.homes and self.options.optimizer and not (trained.updates or self.sharded):
                trace = price_update(trace, self.options.optimizer, trained.parameters, self.update.window)
        return trace, together.machine(machine) if together is not None else machine

    def _needs(self, trace: Trace, machine: Machine) -> int:
        return as_it_is_nbytes(trace, machine, self.options.forwards)

    def _with_update(self, trace: Trace, graph: fx.Graph, trained: TrainedParameters) -> Trace:
        if self.sharded is not None:
            return add_sharded_update(trace, self.sharded, trained)
        if self.options.optimizer is None:
            return trace
        named = dict(self.module.named_parameters())
        owned = parameter_values(graph, trained.captured, named) if trained.captured and not trained.updates else {}
        return add_update(trace, self.options.optimizer, trained, owned, self.update.window)

    def _prober(self, graph: fx.Graph, until: float = math.inf, times: bool = True) -> OpProfiler:
        room = room_nbytes(graph, self.module, self.budget)
        return OpProfiler(unused_nbytes(self.device) // 2, room, until, times=times, counted=self.progress.done)

    def _lowering(self, graph: fx.Graph, trace: Trace, prober: OpProfiler) -> Lowering:
        return Lowering(graph, trace, prober, must=self.options.lower == "inductor")

    @property
    def _lowers(self) -> bool:
        """Whether Inductor compiles parts of the step; not where ranks would each find others worth it."""
        several = self.sharded is not None and not self.sharded.exchange.is_alone
        asked = self.options.lower == "inductor" or (self.options.lower == "auto" and self.device.type == "cuda")
        return asked and not several

    def _with_homes(self, machine: Machine, trained: TrainedParameters) -> Machine:
        """The machine with room for state in the far tier, if state can live there: of shards, states alone. No
        recording does what that takes of the host."""
        if not machine.out or not self.update.can_stream or self.options.cuda_graphs is True:
            return machine
        if shared_memory(self.module, self.options.optimizer):
            return machine
        if self.sharded is not None:
            return replace(machine, homes=True, only_states=True, window=offloaded_nbytes(self.sharded, trained.shards))
        window, speed = self.update.peak_nbytes(trained.parameters), self.update.host_rate(trained.parts)
        ahead = self.update.nbytes_between(trained.parameters)
        return replace(machine, homes=True, window=window, ahead=ahead, stepping=speed)
