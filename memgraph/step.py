"""A planned step: what runs it, what is known of it, and what it takes note of.

loss = step(tensors)      a flight begins: forward's half runs; what backward reads waits in a list
loss.backward()           backward's half takes the list and empties it as it reads; see `backward.py`
step.report, step.times   what the flight took, if it was one that is measured
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from passes import Plan
from passes.forwards import waiting_nbytes

from . import company
from .backward import Run, Unforeseen
from .call import Output
from .capture import Captured
from .company import beside, held_nbytes
from .errors import MemgraphError, RecordingError
from .flight import Flight, Tier
from .fused import FusedUpdate
from .fusing import update_nodes
from .lower import Lowering
from .notice import notice
from .oss.inside import Inside
from .peak import Meter, meter_of, resident_bytes
from .recent import Recent, flight_us
from .recording import Recorder, Recording, Replays
from .report import Report
from .roles import Roles
from .shortage import explained
from .slots import HomeSlots
from .split import Halves
from .times import Times, Wall
from .unused import without

MANY = 8  # open forwards, from which on one warning does for more of them


class Step:
    """One signature's step, ready to run.

    `report` is replaced once the first run has been measured, whose bytes are, and the second, whose times are: a meter
    slows short ops down, and a first run sets its kernels up.  Then `again` may know a better step.  Of all later ones
    the wall time is kept; if that is no more what it was, the plan is looked at again (`recent.py`).
    """

    def __init__(
        self, captured: Captured, halves: Halves, tier: Tier | None, report: Report, home_slots: HomeSlots | None = None
    ) -> None:
        self.home_slots = home_slots
        self.landed: Callable[[Step], None] | None = None  # is told when the step has been measured
        self.trained: Sequence[Tensor] = ()  # the parameters that it makes gradients of
        self.again: Callable[[Step, Times], Step] | None = None  # plans once more with what the ops took
        self.replan: Callable[[Step, Times], Step] | None = None  # the same, for later looks
        self.recent = Recent()
        self.times: Times | None = None
        self.fused: FusedUpdate | None = None  # what updates parameters in backward
        self.inside: Inside | None = None  # what sums gradients over ranks in backward
        self.meet: Callable[[], Callable[[], None]] | None = None  # asks whether all ranks are about to do so
        self.excuse: Callable[[], None] | None = None  # tells them that this one can't
        self.lowering: Lowering | None = None  # what of it is compiled
        self.replays: Replays | None = None  # what of it is recorded
        self.kept = 0  # bytes that are forecast for a recording
        self.metered = 0  # forwards that were open at once, at most, when one of them was measured
        self.warned: set[int] = set()  # numbers of open forwards that have been warned of
        self.insists = False  # on being recorded
        self.adding: Plan | None = None  # with which a call like it fits that adds to gradients
        self.captured = captured
        self.halves = halves
        self.partial: dict[frozenset[int], Halves] = {frozenset(): halves}  # by the outputs that are not used
        self.tier = tier
        self.report = report
        self.device = torch.device(report.machine.device)
        self.update_ops = update_nodes(halves.backward.graph) if halves.backward is not None else {}
        given = [op.nbytes for op in report.forecast.trace.ops if op.fn == "gradient"]
        self.roles = Roles.of(captured, given, self.update_ops.values())

    def __call__(
        self, tensors: Sequence[Tensor], unforeseen: Callable[[], Unforeseen], floats: Sequence[float] = ()
    ) -> list[Tensor]:
        """The module's tensor outputs, given its parameters, buffers and inputs, and the floats that its ops read.

        All that is allocated here is measured, if this flight is: also what only prepares it, but for the numbers that
        ranks compare.
        """
        others = beside(map(tensors.__getitem__, self.roles.owners))
        meter = self._meter(len(others))
        with _window(meter):
            flight = self._begun(tensors, meter, others)
            flight.floats = floats
        flight.meeting = self.meet() if self.meet is not None else None
        if flight.coming is not None:
            flight.met()
        try:
            with _window(meter):
                if flight.coming is not None:
                    flight.coming.open()
                if self.halves.backward is not None:
                    return list(Run.apply(self, flight, unforeseen(), *tensors))  # type: ignore[no-untyped-call]
                return flight.forward(tensors, self.roles.outputs)
        finally:
            if self.halves.backward is None:
                self.land(flight)

    def _begun(self, tensors: Sequence[Tensor], meter: Meter | None, others: Sequence[Flight]) -> Flight:
        """A flight whose state is where it belongs, and that is measured or timed if it is to be."""
        flight = self._boarded(tensors)
        flight.given, flight.meter = self.roles.varying, meter
        if others:
            self._accompanied(flight, others, tensors)
        if meter is not None:
            self.metered = len(others) + 1
            flight.absent = self.absent(tensors)
            flight.states = self.fused.states_nbytes() if self.fused is not None else None
        elif self.times is None:
            flight.time(self.device)
        else:
            flight.wall = Wall(self.device)
        return flight

    def _meter(self, others: int) -> Meter | None:
        """What measures a flight beside others: the first one, and once that was timed, the first beside so many."""
        first = self.report.measured is None or (self.times is not None and self.metered <= others)
        return meter_of(self.device) if first else None

    def _accompanied(self, flight: Flight, others: Sequence[Flight], tensors: Sequence[Tensor]) -> None:
        """Warn before a forward beside other open ones if all of them may be more than the budget, and note how many
        there are."""
        flight.others = held_nbytes(others, tensors)
        trace, budget, count = self.report.forecast.trace, self.report.budget, len(others) + 1
        gradients = waiting_nbytes(trace) * (2 if self.adds_itself else 1)
        together = self.report.peak - trace.others + flight.others + gradients
        if together > budget and min(count, MANY) not in self.warned:
            self.warned.add(min(count, MANY))
            notice(
                f"{count} forwards are open at once, and may take {together} bytes together, over the budget of "
                f"{budget}; {_advice(count)}"
            )
        more = max(self.report.together, together)
        self.report = replace(self.report, forwards=max(self.report.forwards, count), together=more)

    @property
    def adds_itself(self) -> bool:
        """Whether backward adds to gradients, unless other flights are open, and is planned to."""
        trace = self.report.forecast.trace
        return self.roles.adds and any(op.fn == "memgraph.accumulate" for op in trace.ops)

    def accompany(self, flight: Flight, tensors: Sequence[Tensor]) -> None:
        """Note what else lies there before the backward of a flight that was beside others: what those hold, gradients
        that wait to be summed, and those in `.grad` of which no forecast knew."""
        others = beside(map(tensors.__getitem__, self.roles.owners), flight)
        there = 0 if self.roles.adds else resident_bytes(self.gradients_there())
        flight.others = max(flight.others, held_nbytes(others, tensors) + company.waiting_nbytes() + there)

    def _recording(self, tensors: Sequence[Tensor]) -> Recording | None:
        """What the next flight flies with: it is made once the step has run op by op, and was measured."""
        if self.replays is None or self.report.measured is None or self.times is None:
            return None
        try:
            return self.replays.ready(tensors, self.recorded)
        except RecordingError as error:
            if self.insists:
                raise
            self.replays, self.report = None, replace(self.report, recorded=f"not recorded: {error}")
            return None

    def recorded(self, tensors: Sequence[Tensor], recorder: Recorder) -> Recording:
        """A recording of the step as it now stands."""
        return Recording(self.halves, self.tier, tensors, self.roles.varying, self.roles.outputs, recorder)

    def rest(self) -> None:
        """Another step wants the device: let a recording's memory go."""
        if self.replays is not None:
            self.replays.end()

    def _boarded(self, tensors: Sequence[Tensor]) -> Flight:
        """A flight for which everything is where it belongs, or on its way; if that can't be, the other ranks are
        told."""
        try:
            if self.home_slots is not None:
                places = self.home_slots.settled(tensors)
                if self.tier is not None:
                    self.tier.bind(places)
            if self.inside is not None:
                self.inside.sweep()  # parts whose gradients are gone take no room
            flight = Flight(self.halves, self.tier, self._recording(tensors))
            if self.device.type != "cpu":
                flight.explained = partial(explained, self.report, self.device)
        except MemgraphError:
            if self.excuse is not None:
                self.excuse()
            raise
        if self.inside is not None:
            flight.coming = self.inside.optimizer.awaited.coming(self.captured, tensors)
        return flight

    def land(self, flight: Flight) -> None:
        """Note what the flight took, if it was measured."""
        took = flight.took if flight.halves is self.halves else None
        if took is not None and self.recent.add(took):
            self._judge()
        times = flight.times()
        if times is not None:
            if self.fused is not None:
                waited = self.fused.waited
                times = times.without({op: waited.get(name, 0.0) for op, name in self.update_ops.items()})
            self.times, self.report = times, replace(self.report, measured_us=times.us)
        was_metered, ended = flight.meter is not None, flight.ended
        allocated = flight.land()
        if was_metered and ended and allocated is None:
            self.report = replace(self.report, unmeasured="a profiler was running, whose place the meter would take")
        if allocated is not None:
            blocks, held = allocated.blocks, allocated.held
            said = f"{self.report.forwards} forwards were open at once" if flight.shared else ""
            before = self.report.measured or 0  # where several are open, the one that came to most counts
            report = replace(self.report, beyond=flight.beyond or said, blocks=blocks, held=held)
            report = report.with_measured(allocated.peak + flight.others, flight.absent, flight.states)
            self.report = report if before <= (report.measured or 0) else self.report
            if self.landed is not None and self.halves.backward is not None:
                self.landed(self)

    def _judge(self) -> None:
        """Have the plan looked at again, with the times of the next flight's ops, if the latest steps call for that."""
        if self.replan is None or self.again is not None or self.times is None or self.replays is not None:
            return
        report = self.report
        plain_us = report.choice.captured.us
        if report.plan and self.recent.calls_for_look(
            self.forecast_us, self.times.us, plain_us, report.planned_us
        ):  # fmt: skip
            self.again, self.times, self.recent = self.replan, None, self.recent.after_look()

    @property
    def forecast_us(self) -> float:
        """Microseconds that forward and backward were foretold to take."""
        return flight_us(self.report.forecast, updates=self.fused is not None) + self.report.pages_us

    @property
    def reported(self) -> Report:
        """The report, with what the latest steps took."""
        median_us = self.recent.median_us
        if median_us is None:
            return self.report
        return replace(self.report, recent_us=median_us, flight_us=self.forecast_us)

    def halves_without(self, unused: frozenset[int]) -> Halves:
        """The halves for a backward to which no gradients of these outputs come."""
        found = self.partial.get(unused)
        if found is None:
            backward = self.halves.backward
            assert backward is not None
            places = [place for place, output in enumerate(self.roles.tangents) if output in unused]
            found = replace(self.halves, backward=without(backward, self.halves.names, places))
            self.partial[unused] = found
        return found

    def is_without(self, role: Output, unused: frozenset[int]) -> bool:
        """Whether eager makes no such gradient if none come for these outputs."""
        return bool(unused) and self.captured.sources[role] <= unused

    @property
    def is_due(self) -> bool:
        """Whether its plan is to be looked at again, now that its times are known."""
        return self.again is not None and self.times is not None

    def better(self) -> Step:
        """This step, or the one that is to take its place.  It is looked for once."""
        again, times = self.again, self.times
        if again is None or times is None:
            return self
        self.again = None
        return again(self, times)

    def gradients_there(self) -> list[Tensor]:
        """The gradients that the parameters have now, and this rank's parts of those that ranks have summed."""
        parts = [part for bucket in self.roles.shards if (part := self.shard(bucket)) is not None]
        return parts + [parameter.grad for parameter in self.trained if parameter.grad is not None]

    def absent(self, tensors: Sequence[Tensor]) -> int:
        """The bytes of gradients that would be added to, and are not there: an optimizer of some parameters lets only
        theirs go; and what is kept for a recording."""
        parts = sum(nbytes for bucket, nbytes in self.roles.added_shards if self.shard(bucket) is None)
        return self.kept + parts + sum(nbytes for place, nbytes in self.roles.added if tensors[place].grad is None)

    def shard(self, bucket: int) -> Tensor | None:
        """This rank's part of a bucket, if backward has left it there."""
        return self.inside.parts.get(bucket) if self.inside is not None else None


def _window(meter: Meter | None) -> AbstractContextManager[None]:
    """In which is measured what is allocated, if anything is measured at all."""
    return meter.window() if meter is not None else nullcontext()


def _advice(count: int) -> str:
    if count < MANY:
        return f"with forwards={count} they are planned to keep it"
    return "a forward that never has a backward belongs under torch.no_grad()"
