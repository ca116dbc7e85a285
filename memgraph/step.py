"""A planned step, run: forward, what is saved, backward, and the gradients on their way to the parameters.

loss = step(tensors)      forward's half runs; what backward reads waits in a list
loss.backward()           backward's half takes the list and empties it as it reads
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph

from .call import Output
from .capture import Captured
from .company import join
from .errors import MemgraphError, RecordingError
from .flight import Flight, Tier
from .fused import FusedUpdate
from .fusing import update_nodes
from .lower import Lowering
from .oss.inside import Inside
from .recording import Recorder, Recording, Replays
from .report import Report
from .signature import has_hooks, in_process_group, is_watched
from .slots import Homes
from .split import Halves
from .times import Times
from .unused import without

# The gradients of all inputs, if gradients arrive for other outputs than was planned.
Unforeseen = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


class Step:
    """One signature's step, ready to run.

    `report` is replaced once the first run has been measured, whose bytes are, and the second, whose times are: a meter
    slows short ops down, and a first run sets its kernels up.  Then `again` may know a better step.
    """

    def __init__(
        self, captured: Captured, halves: Halves, tier: Tier | None, report: Report, homes: Homes | None = None
    ) -> None:
        self.homes = homes
        self.landed: Callable[[Step], None] | None = None  # is told when the step has been measured
        self.trained: Sequence[Tensor] = ()  # the parameters that it makes gradients of
        self.again: Callable[[Step, Times], Step] | None = None  # plans once more with what the ops took
        self.times: Times | None = None
        self.fused: FusedUpdate | None = None  # what updates parameters in backward
        self.inside: Inside | None = None  # what sums gradients over ranks in backward
        self.meet: Callable[[], Callable[[], None]] | None = None  # asks whether all ranks are about to do so
        self.excuse: Callable[[], None] | None = None  # tells them that this one can't
        self.lowering: Lowering | None = None  # what of it is compiled
        self.replays: Replays | None = None  # what of it is recorded
        self.kept = 0  # bytes that are forecast for a recording
        self.insists = False  # on being recorded
        self.captured = captured
        self.halves = halves
        self.partial: dict[frozenset[int], Halves] = {frozenset(): halves}  # by the outputs that are not used
        self.tier = tier
        self.report = report
        self.outputs = sum(role.kind == "output" for role in captured.outputs)
        self.tangents = tuple(role.index for role in captured.inputs if role.kind == "tangent")
        self.gradients = tuple(role for role in captured.outputs if role.kind not in ("output", "shard"))
        self.shards = tuple(role.index for role in captured.outputs if role.kind == "shard")  # by bucket
        roles = [role for role in captured.inputs if role.kind != "tangent"]
        given = [op.nbytes for op in report.forecast.trace.ops if op.fn == "gradient"]
        self.adds = bool(given)
        self.device = torch.device(report.machine.device)
        self.place = {(role.kind, role.name, role.index): i for i, role in enumerate(roles)}
        self.update_ops = update_nodes(halves.backward.graph) if halves.backward is not None else {}
        self.updates = {name: self.place["parameter", name, -1] for name in self.update_ops.values()}
        self.exchanged = {name: self.place["parameter", name, -1] for name in captured.exchanged}
        self.owned = [self.target(role) for role in self.gradients if role.kind == "gradient"]
        here = len(self.owned)
        # With the bytes of each.
        self.added = tuple(zip(self.owned, given[:here], strict=True)) if self.adds else ()
        self.added_shards = tuple(zip(self.shards, given[here:], strict=True)) if self.adds else ()
        self.owned += (*self.updates.values(), *self.exchanged.values())

    def __call__(self, tensors: Sequence[Tensor], unforeseen: Unforeseen) -> list[Tensor]:
        """The module's tensor outputs, given its parameters, buffers and inputs."""
        flight = self._boarded(tensors)
        flight.meeting = self.meet() if self.meet is not None else None
        if flight.coming is not None:
            flight.met()
            flight.coming.open()
        if self.report.measured is None:
            flight.measure(self.device)
            flight.absent = self.absent(tensors)
            flight.states = self.fused.states_nbytes() if self.fused is not None else None
        elif self.times is None:
            flight.time(self.device)
        if self.halves.backward is not None:
            return list(_Run.apply(self, flight, unforeseen, *tensors))  # type: ignore[no-untyped-call]
        try:
            return flight.forward(tensors, self.outputs)
        finally:
            self.land(flight)

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
        varying = [i for (kind, _, _), i in self.place.items() if kind == "input"]
        return Recording(self.halves, self.tier, tensors, varying, self.outputs, recorder)

    def rest(self) -> None:
        """Another step wants the device: let a recording's memory go."""
        if self.replays is not None:
            self.replays.end()

    def _boarded(self, tensors: Sequence[Tensor]) -> Flight:
        """A flight for which everything is where it belongs, or on its way; if that can't be, the other ranks are
        told."""
        try:
            if self.homes is not None:
                places = self.homes.settled(tensors)
                if self.tier is not None:
                    self.tier.bind(places)
            if self.inside is not None:
                self.inside.sweep()  # parts whose gradients are gone take no room
            flight = Flight(self.halves, self.tier, self._recording(tensors))
        except MemgraphError:
            if self.excuse is not None:
                self.excuse()
            raise
        if self.inside is not None:
            flight.coming = self.inside.optimizer.awaited.coming(self.captured, tensors)
        return flight

    def land(self, flight: Flight) -> None:
        """Note what the flight took, if it was measured."""
        times = flight.times()
        if times is not None:
            if self.fused is not None:
                waited = self.fused.waited
                times = times.without({op: waited.get(name, 0.0) for op, name in self.update_ops.items()})
            self.times, self.report = times, replace(self.report, measured_us=times.us)
        allocated = flight.land()
        if allocated is not None:
            self.report = replace(self.report, retained=flight.retained).with_measured(
                allocated.peak, flight.absent, flight.states
            )
            if self.landed is not None and self.halves.backward is not None:
                self.landed(self)

    def halves_without(self, unused: frozenset[int]) -> Halves:
        """The halves for a backward to which no gradients of these outputs come."""
        found = self.partial.get(unused)
        if found is None:
            backward = self.halves.backward
            assert backward is not None
            places = [place for place, output in enumerate(self.tangents) if output in unused]
            found = replace(self.halves, backward=without(backward, self.halves.names, places))
            self.partial[unused] = found
        return found

    def is_without(self, name: str, unused: frozenset[int]) -> bool:
        """Whether a parameter has no gradient if none come for these outputs."""
        return bool(unused) and self.captured.sources[Output("gradient", name)] <= unused

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
        parts = [part for bucket in self.shards if (part := self.shard(bucket)) is not None]
        return parts + [parameter.grad for parameter in self.trained if parameter.grad is not None]

    def absent(self, tensors: Sequence[Tensor]) -> int:
        """The bytes of gradients that would be added to, and are not there: an optimizer of some parameters lets only
        theirs go; and what is kept for a recording."""
        parts = sum(nbytes for bucket, nbytes in self.added_shards if self.shard(bucket) is None)
        return self.kept + parts + sum(nbytes for place, nbytes in self.added if tensors[place].grad is None)

    def shard(self, bucket: int) -> Tensor | None:
        """This rank's part of a bucket, if backward has left it there."""
        return self.inside.parts.get(bucket) if self.inside is not None else None

    def target(self, role: Any) -> int:
        """The place among the inputs of what a gradient is of."""
        return self.place["parameter" if role.kind == "gradient" else "input", role.name, role.index]


class _Run(torch.autograd.Function):
    """Autograd's view of a step: one node from the inputs to the outputs."""

    @staticmethod
    def forward(ctx: Any, step: Step, flight: Flight, unforeseen: Unforeseen, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.flight, ctx.unforeseen, ctx.parameters = step, flight, unforeseen, tensors
        try:
            outputs = flight.forward(tensors, step.outputs)
        except BaseException:
            step.land(flight)
            raise
        join(flight, frozenset(id(tensors[i]) for i in step.owned))
        ctx.mark_non_differentiable(*(x for i, x in enumerate(outputs) if i not in step.captured.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        step: Step = ctx.step
        if torch.is_grad_enabled():
            raise MemgraphError(
                "the gradients of a memgraph module can't be differentiated again (create_graph=True): "
                "its backward is a graph of its own; use the plain module for this"
            )
        results: list[Tensor | None] = [None] * len(ctx.parameters)
        more = any(tangent is not None and i not in step.tangents for i, tangent in enumerate(tangents))
        if more or any(tangents[i] is None for i in step.captured.hoped):
            if step.updates:
                step.land(ctx.flight)
            results[:] = ctx.unforeseen(tangents)
        else:
            for role, gradient in zip(step.gradients, _backward(ctx, tangents), strict=True):
                results[step.target(role)] = gradient
        return None, None, None, *results


def _backward(ctx: Any, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients that autograd has to hand on; those of parameters are put into `.grad` here, where nobody
    watches."""
    step, flight = ctx.step, ctx.flight
    if flight.meter is not None:
        flight.absent = min(flight.absent, step.absent(ctx.parameters))
    behind = ctx.next_functions  # is made anew whenever it is read
    seen = in_process_group() or flight.shared
    takers = [
        _taker(behind[step.target(role)][0]) if role.kind == "gradient" and not seen else None
        for role in step.gradients
    ]
    keep = _get_current_graph_task_keep_graph()
    apart = {}
    if step.homes is not None:
        apart, places = step.homes.before(takers, step.adds)
        flight.bind(places)
    there = [taker.grad if taker is not None else None for taker in takers]
    added = (
        [grad for role, grad in zip(step.gradients, there, strict=True) if role.kind == "gradient"] if step.adds else []
    )
    if keep:
        _warn_of_retained(step.report)
    unused = frozenset(i for i in step.tangents if tangents[i] is None)
    gone = [bool(unused) and step.captured.sources[role] <= unused for role in step.gradients]
    updated = {name: None if seen else _taker(behind[place][0]) for name, place in step.updates.items()}
    try:
        if step.fused is not None and updated:
            flight.update = step.fused.begin(updated, [tangents[i] for i in step.tangents], keep)
        if step.inside is not None and step.shards:
            flight.met()
            owners = {name: i for name, i in step.exchanged.items() if not step.is_without(name, unused)}
            flight.exchange = step.inside.begin({name: _taker(behind[i][0]) for name, i in owners.items()})
            added += map(step.shard, step.shards) if step.adds else ()
        flight.halves = step.halves_without(unused) if not step.shards else step.halves
        found = flight.backward([tangents[i] for i in step.tangents], added, keep)
        if step.fused is not None and updated:
            step.fused.ended()
        gradients, parts = found[: len(step.gradients)], found[len(step.gradients) :]
        if step.inside is not None and step.shards:
            step.inside.give(dict(zip(step.shards, parts, strict=True)))
        if step.homes is not None:
            kept = [None if none else taker for taker, none in zip(takers, gone, strict=True)]
            gradients = step.homes.after(gradients, kept, apart, flight.sent)
    except BaseException as error:
        if step.fused is not None and updated:
            step.fused.failed(error)
        raise
    finally:
        if not keep or step.updates:
            step.land(flight)
    return [
        _nothing(behind[step.target(role)][0], gradient) if none else _give(taker, gradient)
        for role, taker, gradient, none in zip(step.gradients, takers, gradients, gone, strict=True)
    ]


def _warn_of_retained(report: Report) -> None:
    """No plan counts a graph that is kept; one that has no room for it runs all the same, as two forwards do."""
    if report.forecast.retained > report.budget:
        warnings.warn(
            f"backward(retain_graph=True) keeps all that forward saved: this step may take {report.forecast.retained} "
            f"bytes, over its budget of {report.budget}; it is within it if each forward has one backward",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip


def _taker(node: Any) -> Tensor | None:
    """The parameter of an autograd node that would only accumulate into its `.grad`, if nobody is told of it."""
    parameter: Tensor | None = getattr(node, "variable", None)
    if parameter is None or has_hooks(parameter):
        return None
    try:
        return parameter if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch.autograd.grad asks for this gradient
        return None


def _nothing(node: Any, gradient: Tensor) -> Tensor | None:
    """What autograd hands on of a gradient that eager would not have made: nothing, but zeros to whom it would call all
    the same, hooks and what comes before the module, that can do with less no worse than with nothing."""
    leaf = getattr(node, "variable", None)
    return gradient.zero_() if leaf is None or is_watched(leaf) else None


def _give(taker: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Put a gradient where it belongs, as autograd's own accumulation would; what autograd shall hand on is
    returned."""
    if taker is None:
        return gradient
    if taker.grad is None:
        taker.grad = gradient
    elif taker.grad is not gradient:
        taker.grad.add_(gradient)
    return None
