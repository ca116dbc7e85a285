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

from torch import fx, nn
from torch.nn.parameter import is_lazy

import passes
from passes import Choice, Machine, Plan, Stream, Trace, apply, make_plan, predict
from passes.exchanges import placed, sequence
from passes.forwards import as_it_is_nbytes, plan_forwards
from passes.replays import with_kept

from .accumulation import accumulating
from .adding import Adding, adding, else_known, warn, with_left
from .alone import ALONE, capturing
from .belongings import belongings
from .budget import budget_nbytes
from .call import Args, Kwargs
from .capture import Captured, Wanted
from .captures import Like
from .device import device_of, hold_to, releasing_cached, return_freed_memory, unused_nbytes
from .errors import CaptureError, RecordingError
from .far_update import FarStates, FarUpdate
from .first_update import FirstUpdate
from .float_capture import FloatTrial
from .fused import FusedUpdate
from .groups import trained_by
from .letting_go import fitting
from .lever import advised
from .libraries import libraries_nbytes, with_libraries
from .links import sizes_of
from .lower import Lowering
from .oss import OSS
from .oss.meeting import NEW, digest, excuse, meet, telling_failure
from .oss.network import with_network
from .oss.step_bytes import far_nbytes, with_sharded_update
from .oss.together import Together
from .over_budget import leaves_time, over_budget, smallest_of
from .overlap import shared_memory
from .pages import pages_us
from .peak import resident_bytes
from .plan_cache import is_settled, planned, remember
from .probe import Prober, room_nbytes
from .progress import Progress
from .recent import Recent
from .recordable import let_record
from .recording import recorder_of
from .refusal import refuse_hooks
from .replan import as_measured, replanned
from .report import Report
from .residence import Residence
from .reuse import reused
from .rewrite import fake_mode, rewrite
from .signature import has_gradients, watched
from .slots import HomeSlots, slots, unread
from .sources import forgotten_sources
from .split import split
from .step import Step
from .step_graph import captured_call, with_collectives, with_updates
from .summarize import summarize
from .tiers import far_tier, ground, linked, tier_name
from .times import Times
from .trained import Trained
from .truth import correct
from .update import with_price, with_update
from .wanted import update_roots
from .wishes import Wishes


class Planner:
    """Plans the steps of one module."""

    def __init__(self, module: nn.Module, wishes: Wishes) -> None:
        self.module = module
        self.wishes = wishes
        optimizer = wishes.optimizer
        self.sharded = optimizer if isinstance(optimizer, OSS) else None
        far = self.sharded.far if self.sharded is not None else None
        self.residence = Residence(module)
        self.progress = Progress()
        self.update = far or FarUpdate(optimizer, wishes.fuse, hosts=wishes.hosts)
        self._look()
        self.fused = FusedUpdate(module, optimizer, self.update) if optimizer is not None and wishes.fuse else None
        by_itself = optimizer is not None and not wishes.fuse
        self._first_update = FirstUpdate(optimizer, self.device) if optimizer is not None and by_itself else None

    def _look(self) -> None:
        """Where the module lies, and what that means for the budget and the far tier; it may be moved later."""
        owned = [*self.module.parameters(), *self.module.buffers()]
        if any(map(is_lazy, owned)):
            raise CaptureError("parameters have no shape yet: run the lazy module once before it is compiled")
        device = device_of(owned)
        if getattr(self, "device", None) != device:
            self.budget = budget_nbytes(self.wishes.budget, device, resident_bytes(owned))
            self.tier = tier_name(self.wishes.offload, device)
            if self.wishes.strict:
                hold_to(self.budget, device)
            self.recorder = recorder_of(device) if self.wishes.graphs else None
            self.residence.where = self.update.where = ground(device, self.wishes.spill_dir, self.wishes.pinned)
            self.device = device

    def refuse_optimizer(self) -> None:
        """
        Raises:
            UpdateError: the optimizer is one with which no call can be planned.
        """
        if self.sharded is None:
            there = resident_bytes([*self.module.parameters(), *self.module.buffers()])
            # Without a far tier it is not the optimizer that keeps all on the device.
            self.update.refuse_at_home(there, math.inf if self.tier is None else self.budget)

    def step(
        self, args: Args, kwargs: Kwargs, wanted: Wanted, like: Like | None = None, floats: FloatTrial | None = None
    ) -> Step:
        """The step of this call, ready; `like` is that of the same call when gradients were there, or were not, and
        `floats` of the call are inputs of its graph, if they can be.

        Raises:
            BudgetError: no plan fits the budget.
            CaptureError: the module can't be captured.
            PlanError: plans were given, and none is good for this call.
        """
        with ALONE, forgotten_sources(), releasing_cached(self.device), Progress() as self.progress:
            return self._step(args, kwargs, wanted, like, floats)

    def priced(self, args: Args, kwargs: Kwargs, wanted: Wanted) -> tuple[Trace, Machine]:
        """What this call's step is planned on: its text with prices, and the machine.

        Raises:
            CaptureError: the module can't be captured.
            FusedError: its loss is not in the step, and updates are to run in backward.
        """
        with ALONE, Progress() as self.progress:
            _, graph, trained = self._begun(args, kwargs, wanted)
            return self._price(graph, trained)

    def _step(self, args: Args, kwargs: Kwargs, wanted: Wanted, like: Like | None, floats: FloatTrial | None) -> Step:
        begin = time.perf_counter()
        captured, graph, trained = self._begun(args, kwargs, wanted, like, floats)
        together, later = self._together(trained), self._later(captured, graph, trained)
        captured_s, until = time.perf_counter() - begin, time.monotonic() + self.wishes.seconds
        self.progress.bound(until)
        try:
            machine, choice = self._plan(graph, trained, until, like.adding if like is not None else None)
        except passes.BudgetError as error:
            few = leaves_time(len(graph.nodes), captured_s, until)
            advised = partial(self._advised, captured=captured, args=args, kwargs=kwargs, wanted=wanted)
            needed = partial(self._smallest, later, trained, until) if later is not None else lambda: None
            raise over_budget(error, advised if few else lambda error: error, needed) from None
        found = self._adding(later, choice, trained, until) if later is not None and not self.wishes.plans else None
        step, plain = self._made(captured, graph, machine, choice, trained, begin), choice.captured.trace
        if found is not None:
            step.adding, step.report = found.plan, replace(step.report, adding=found.needed)
        if step.lowering is not None:
            choice = step.lowering.stated(choice, machine)
        step.report = replace(step.report, choice=choice, pages_us=pages_us(choice.forecast, machine))
        if together is None:
            step.again = step.replan = partial(self._again, graph, trained, plain)
        elif trained.shards or captured.gathers:  # and is not planned again, with times that differ from rank to rank
            step.meet = partial(self._meet, sequence(choice.forecast.trace))
            step.excuse = partial(excuse, together.exchange, self.device)
        return step

    def _begun(
        self, args: Args, kwargs: Kwargs, wanted: Wanted, like: Like | None = None, floats: FloatTrial | None = None
    ) -> tuple[Captured, fx.Graph, Trained]:
        """The call, captured, and the graph that is planned: it adds to gradients, and updates, if it is to."""
        with telling_failure(self.sharded, self.module.parameters()):
            self._look()
            refuse_hooks(self.module)
            if self.sharded is not None:
                self.sharded.awaited.capturing(self.module.parameters())
            again = like if self.fused is None and self.sharded is None else None
            self.progress.phase("capturing forward and backward")
            call = self.module, args, kwargs, update_roots if self.fused else wanted, self.device, floats
            captured = again.captured if again else captured_call(*call)
            trained = trained_by(captured, self.module, self.wishes.optimizer, self.wishes.fuse)
            captured, trained = with_updates(captured, trained, self.module, self.fused)
            captured, trained = with_collectives(captured, trained, self.module, self.sharded)
        if (together := self._together(trained)) is not None:
            meet(together.exchange, self.device, NEW)()
        adds = self.wishes.accumulate or has_gradients(self.module.parameters())
        graph = self._accumulating(captured) if adds else captured.graph.graph
        return captured, graph, trained

    def _made(
        self, captured: Captured, graph: fx.Graph, machine: Machine, choice: Choice, trained: Trained, begin: float
    ) -> Step:
        """The step of a plan, ready to run."""
        planned = rewrite(graph, choice.forecast.trace)
        lowering = self._lowering(planned, choice.forecast.trace, self._prober(graph)) if self._lowers else None
        lowered, apart_us, refused = None, 0.0, 0
        if lowering is not None:
            planned, text = lowering.lowered(machine)
            refused = lowering.refused
            lowered, apart_us = predict(text, machine), predict(lowering.trace, machine).us
        its = slots(planned, captured)
        tier = far_tier(self.device, [slot.nbytes for slot in its], self.wishes.spill_dir, self.wishes.pinned)
        if choice.plan and self.device.type == "cpu":
            return_freed_memory()
        report = Report(
            machine, choice, planned_us=(time.perf_counter() - begin) * 1e6, lowered=lowered, apart_us=apart_us,
            counted=self.wishes.optimizer is not None, uncompiled=refused,
        )  # fmt: skip
        home_slots = None
        if any(isinstance(decision, Stream) for decision in choice.plan) or any(slot.home for slot in its):
            states = FarStates.of(self.update, choice.forecast.trace, trained.parts)
            home_slots = HomeSlots(self.residence, its, captured, states, unread(planned, captured))
        step = Step(captured, split(planned, captured.graph, captured.floats), tier, report, home_slots)
        step.trained, step.landed, step.fused = trained.parameters, self._first_update, self.fused
        step.inside = self.sharded.inside if self.sharded is not None else None
        step.lowering = lowering
        if self.recorder is not None:
            let_record(step, planned, self.recorder, self.wishes.graphs is True)
        return step

    def _again(self, graph: fx.Graph, trained: Trained, plain: Trace, step: Step, times: Times) -> Step:
        """The step of a plan that is better, now that its times are known; the same step if there is none.

        Nobody closes the tier of the old one: it closes itself when its last flight has landed.
        """
        begin, choice = time.perf_counter(), step.report.choice
        if step.lowering is not None:
            times = step.lowering.apart(times)
        trace, machine = as_measured(choice, step.report.machine, times.beside(self.update.moved))
        step.report = replace(step.report, repriced_us=predict(apply(trace, choice.plan), machine).us)
        known = plain, step.report.machine, self.wishes.options
        settled = step.recent.is_untouched and is_settled(*known)
        if not choice.plan or self.wishes.plans or settled:  # a plan that was given is kept
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
        new.replan, new.recent = step.replan, Recent(step.recent.looks, step.recent.steps)
        new.adding, new.warned, new.report = step.adding, step.warned, replace(new.report, adding=step.report.adding)
        if step.home_slots is not None:
            step.home_slots.replaced(new.home_slots)
        return new

    def _later(self, captured: Captured, graph: fx.Graph, trained: Trained) -> fx.Graph | None:
        """The graph of the same call when there are gradients to add to, if that is another one and may be met."""
        adds = graph is not captured.graph.graph or self.wishes.accumulate is False
        return None if adds or not trained.parameters or trained.updates else self._accumulating(captured)

    def _accumulating(self, captured: Captured) -> fx.Graph:
        """The graph that adds to gradients, but for those that autograd adds: of several open forwards, all."""
        alone = self.wishes.forwards == 1
        return accumulating(captured, watched(self.module) if alone else dict(self.module.named_parameters()))

    def _adding(self, later: fx.Graph, choice: Choice, trained: Trained, until: float) -> Adding:
        """What such a call needs; if no plan for it is found, that is said."""
        trace, machine = self._price(later, trained, until)
        tries = ((), choice.plan) if self.wishes.forwards == 1 else ()
        found = adding(trace, machine, tries, partial(self._chosen, trained=trained, until=until))
        warn(found, machine.budget)
        return found if tries else replace(found, plan=None)  # one forward alone may fit with what several do not

    def _meet(self, exchanged: str) -> Callable[[], None]:
        """Begin to ask whether all ranks are about to exchange this, and await the same."""
        assert self.sharded is not None
        known = digest(f"{exchanged}\n{sorted(self.sharded.awaited.buckets)}")
        return meet(self.sharded.exchange, self.device, known)

    def _together(self, trained: Trained) -> Together | None:
        """The ranks that plan this step together, if there are others."""
        if self.sharded is None or self.sharded.exchange.is_alone or not trained.parameters:
            return None
        return Together(self.sharded.exchange, self.device)

    def _advised(
        self, error: passes.BudgetError, captured: Captured, args: Args, kwargs: Kwargs, wanted: Wanted
    ) -> passes.BudgetError:
        if self.fused is not None:
            return error
        machine = Machine(self.budget, str(self.device))
        with capturing(self.module):
            return advised(error, self.module, args, kwargs, wanted, captured.graph.graph, machine)

    def _smallest(self, graph: fx.Graph, trained: Trained, until: float) -> int:
        return smallest_of(lambda: self._plan(graph, trained, until)[1].forecast)

    def _plan(
        self, graph: fx.Graph, trained: Trained, until: float, known: Plan | None = None
    ) -> tuple[Machine, Choice]:
        trace, machine = self._price(graph, trained, until)
        return machine, self._chosen(trace, machine, trained, until, known)

    def _chosen(
        self, trace: Trace, machine: Machine, trained: Trained, until: float, known: Plan | None = None
    ) -> Choice:
        found = else_known(partial(self._found, until=until), known)
        search = partial(reused, self.wishes.plans) if self.wishes.plans else found
        together = self._together(trained)
        return together.choice(trace, machine, search) if together else search(trace, machine)

    def _search(self, trace: Trace, machine: Machine, until: float | None = None) -> Choice:
        until = time.monotonic() + self.wishes.seconds if until is None else until
        self.progress.phase("planning, passes tried", len(passes.PASSES))
        search = partial(self._searched, until)
        if self.wishes.forwards > 1:  # while one of them runs, the caller has the outputs of the others
            return plan_forwards(trace, machine, self.wishes.forwards, search)
        return fitting(search, trace, machine)

    def _searched(self, until: float, trace: Trace, machine: Machine) -> Choice:
        return make_plan(trace, machine, log=self.progress.done, seconds=max(0.0, until - time.monotonic()))

    def _found(self, trace: Trace, machine: Machine, until: float) -> Choice:
        """The plan that was found for such a step before, or one that is searched for; always the latter for several
        open forwards, since no kept plan knows what the others hold."""
        search = partial(self._search, until=until)
        alone = self.wishes.forwards == 1
        return planned(trace, machine, self.wishes.options, search) if alone else search(trace, machine)

    def _price(self, graph: fx.Graph, trained: Trained, until: float = math.inf) -> tuple[Trace, Machine]:
        together = self._together(trained)
        machine = Machine(together.least(self.budget) if together else self.budget, str(self.device))
        bare = self._needs(summarize(graph), machine)
        if self.device.type == "cpu" and bare > self.budget:
            return_freed_memory()  # now, so that ops are timed as they will run in a step that needs a plan
        if together is not None and self.sharded is not None and (trained.shards or trained.gathers):
            machine = with_network(machine, self.sharded, together)
        with together.telling() if together else nullcontext():
            libraries_nbytes(self.device)  # are there before anything is measured
            # A step that fits as it is needs no times; ranks that plan together do all alike.
            prober = self._prober(graph, until, times=bare > machine.budget or self._lowers or together is not None)
            self.progress.phase("pricing ops", len(graph.nodes))
            correct(graph, fake_mode(graph), prober.made)
            trace = with_libraries(placed(summarize(graph, prober), not machine.hides), self.device)
            trace = self._with_update(trace, graph, trained)
            trace = with_kept(trace) if self.wishes.graphs is True else trace
            trace = trace if together or self.wishes.plans else with_left(trace, self.module, trained.parameters)
        trace = together.trace(trace) if together else trace
        if self._needs(trace, machine) > machine.budget:
            trace = trace if prober.times else prober.timed(trace, graph)
            if self._lowers:
                trace = self._lowering(graph, trace, prober).shared()
            wishes, sizes = self.wishes, sizes_of(trace)
            with together.telling() if together else nullcontext():
                far = self.tier, self.device, wishes.spill_dir, sizes, wishes.wire, wishes.pinned
                machine = linked(machine, *far, prober.room)
                machine = self._with_homes(machine, trained)
            if machine.turns and machine.homes and self.wishes.optimizer and not (trained.updates or self.sharded):
                trace = with_price(trace, self.wishes.optimizer, trained.parameters, self.update.window)
        return trace, together.machine(machine) if together is not None else machine

    def _needs(self, trace: Trace, machine: Machine) -> int:
        return as_it_is_nbytes(trace, machine, self.wishes.forwards)

    def _with_update(self, trace: Trace, graph: fx.Graph, trained: Trained) -> Trace:
        if self.sharded is not None:
            return with_sharded_update(trace, self.sharded, trained)
        if self.wishes.optimizer is None:
            return trace
        named = dict(self.module.named_parameters())
        owned = belongings(graph, trained.captured, named) if trained.captured and not trained.updates else {}
        return with_update(trace, self.wishes.optimizer, trained, owned, self.update.window)

    def _prober(self, graph: fx.Graph, until: float = math.inf, times: bool = True) -> Prober:
        room = room_nbytes(graph, self.module, self.budget)
        return Prober(unused_nbytes(self.device) // 2, room, until, times=times, counted=self.progress.done)

    def _lowering(self, graph: fx.Graph, trace: Trace, prober: Prober) -> Lowering:
        return Lowering(graph, trace, prober, must=self.wishes.lower == "inductor")

    @property
    def _lowers(self) -> bool:
        """Whether Inductor compiles parts of the step; not where ranks would each find others worth it."""
        several = self.sharded is not None and not self.sharded.exchange.is_alone
        asked = self.wishes.lower == "inductor" or (self.wishes.lower == "auto" and self.device.type == "cuda")
        return asked and not several

    def _with_homes(self, machine: Machine, trained: Trained) -> Machine:
        """The machine with room for state in the far tier, if state can live there: of shards, states alone. No
        recording does what that takes of the host."""
        if not machine.out or not self.update.can_stream or self.wishes.graphs is True:
            return machine
        if shared_memory(self.module, self.wishes.optimizer):
            return machine
        if self.sharded is not None:
            return replace(machine, homes=True, only_states=True, window=far_nbytes(self.sharded, trained.shards))
        window, speed = self.update.nbytes(trained.parameters), self.update.stepping(trained.parts)
        ahead = self.update.between(trained.parameters)
        return replace(machine, homes=True, window=window, ahead=ahead, stepping=speed)
