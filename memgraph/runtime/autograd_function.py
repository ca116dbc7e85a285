"""Autograd's view of a step: one node from the inputs to the outputs, whose backward runs the step's other half.

    outputs = Run.apply(step, flight, unforeseen, *tensors)    forward's half has run
    loss.backward()                                            backward's half runs

The gradients of parameters are put into `.grad` here, where nobody watches, and autograd hands on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph

from ..errors import MemgraphError
from ..graph.captured import Output
from ..guards.signature import has_hooks, in_process_group
from ..profile.memory_meter import resident_bytes
from ..system.user_warning import warn_user
from .company import note_concurrent_run, passed_outputs
from .released_outputs import BorrowedOutputs, refuse_kept, releases_outputs
from .step_run import StepRun

if TYPE_CHECKING:
    from .step import Step

# The gradients of all inputs, if gradients arrive for other outputs than was planned.
UnplannedGradient = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


class StepFunction(torch.autograd.Function):
    """A step, as autograd calls it."""

    boxed_grads_call = True  # tangents come in a list, from which they go as they are read

    @staticmethod
    def forward(
        ctx: Any, step: Step, flight: StepRun, unforeseen: UnplannedGradient, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.flight, ctx.unforeseen, ctx.parameters = step, flight, unforeseen, tensors
        try:
            outputs = flight.forward(tensors, step.roles.outputs)
        except BaseException:
            step.land(flight)
            raise
        if releases_outputs(step.report) or flight.meter is not None:
            flight.lent = BorrowedOutputs(outputs)
        note_concurrent_run(flight, frozenset(id(tensors[i]) for i in step.roles.owners))
        ctx.mark_non_differentiable(*(x for i, x in enumerate(outputs) if i not in step.captured.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        tangents: list[Tensor | None] = given[0] if given and isinstance(given[0], list) else list(given)
        step: Step = ctx.step
        if torch.is_grad_enabled():
            raise MemgraphError(
                "the gradients of a memgraph module can't be differentiated again (create_graph=True): "
                "its backward is a graph of its own; use the plain module for this"
            )
        results: list[Tensor | None] = [None] * len(ctx.parameters)
        more = any(tangent is not None and i not in step.roles.tangents for i, tangent in enumerate(tangents))
        if more or any(tangents[i] is None for i in step.captured.hoped):
            if step.roles.updates or not _get_current_graph_task_keep_graph():
                step.land(ctx.flight)  # which holds what no backward will read any more
            results[:] = ctx.unforeseen(tangents)
        else:
            backward = BackwardPass(ctx, tangents)
            try:
                with backward.flight.watched(backward.tangents):
                    gradients = backward.run()
            finally:
                backward.land()
            for role, gradient in zip(step.roles.gradients, gradients, strict=True):
                results[step.roles.target(role)] = gradient
        return None, None, None, *results


class BackwardPass:
    """One backward of a flight: `takers` are the parameters that would take the gradients, where nobody else is told of
    them; `gone` says which gradients eager would not make, since none has come to what they are made of."""

    def __init__(self, ctx: Any, tangents: list[Tensor | None]) -> None:
        self.step: Step = ctx.step
        self.roles = self.step.roles
        self.flight: StepRun = ctx.flight
        self.tensors: Sequence[Tensor] = ctx.parameters
        if self.flight.lent is not None and releases_outputs(self.step.report):
            kept = refuse_kept(self.flight.lent, tangents, self.flight.reads(), self.step.report)
            self.flight.beyond = self.flight.beyond or kept
        self.tangents = [tangents[i] for i in self.roles.tangents]
        self.unused = frozenset(i for i in self.roles.tangents if tangents[i] is None)
        self.keep = _get_current_graph_task_keep_graph()
        self.behind = ctx.next_functions  # is made anew whenever it is read
        shared = self.flight.shared
        self.takers = [
            _taker(self.behind[self.roles.target(role)][0]) if role.kind == "gradient" and not shared else None
            for role in self.roles.gradients
        ]
        self.fused = self.step.fused if self.roles.updates else None
        updated = {name: self.behind[i][0] for name, i in self.roles.updates.items()}
        seen = shared or in_process_group()  # where somebody may want to average the gradient before it is used
        self.updated = {name: None if seen else _taker(node) for name, node in updated.items() if not _is_frozen(node)}
        self.gone = [self.step.is_without(role, self.unused) for role in self.roles.gradients]
        tangents.clear()

    def run(self) -> list[Tensor | None]:
        """The gradients that autograd has to hand on."""
        step, flight = self.step, self.flight
        if flight.meter is not None:
            flight.absent = min(flight.absent, step.absent(self.tensors))
            if flight.shared:
                step.accompany(flight, self.tensors)
        apart: Mapping[int, Tensor] = {}
        if step.home_slots is not None:
            apart, places = step.home_slots.begin_backward(self.takers, self.roles.adds)
            flight.bind(places)
        added = self._there() if self.roles.adds else []
        self._warn()
        try:
            self._begin()
            gradients = self._parted(self._made(added))
            if step.home_slots is not None:
                kept = [None if gone else taker for taker, gone in zip(self.takers, self.gone, strict=True)]
                gradients = step.home_slots.finish_backward(gradients, kept, apart, flight.sent)
        except BaseException as error:
            if self.fused is not None:
                self.fused.abort(error)
            raise
        given = self._given(gradients)
        if flight.shared:
            passed_outputs([gradient for gradient in given if gradient is not None])
        return given

    def land(self) -> None:
        """The flight is over, unless another backward may go through it."""
        if not self.keep or self.roles.updates:
            self.step.land(self.flight)

    def _warn(self) -> None:
        """No plan counts a graph that is kept, nor gradients beside others; a step that has no room for these runs all
        the same, as two forwards do."""
        forecast, beside = self.step.report.forecast, self._beside()
        if self.keep:
            said = "backward(retain_graph=True) keeps all that forward saved"
            self._over(forecast.retained, said, "each forward has one backward")
        if beside:
            self.flight.beyond = "gradients that were asked for lie beside those that were there"
            said = "torch.autograd.grad and backward(inputs=...) make gradients beside those that are there"
            self._over(forecast.peak + beside, said, "there are none yet when forward begins")

    def _over(self, nbytes: int, said: str, unless: str) -> None:
        """Warn if that may be more than the budget."""
        budget = self.step.report.budget
        if nbytes > budget:
            over = f"this step may take {nbytes} bytes, over its budget of {budget}; it is within it if {unless}"
            warn_user(f"{said}: {over}")

    def _beside(self) -> int:
        """Bytes on the device of gradients to which this step would add, and which this backward leaves alone."""
        if not self.roles.adds or self.flight.shared:
            return 0
        rows = zip(self.roles.gradients, self.takers, strict=True)
        places = [self.roles.target(role) for role, taker in rows if role.kind == "gradient" and taker is None]
        left = [parameter for parameter in map(self.tensors.__getitem__, places) if not has_hooks(parameter)]
        return resident_bytes(parameter.grad for parameter in left if parameter.grad is not None)

    def _there(self) -> list[Tensor | None]:
        """The gradients that are there to be added to, of each parameter that the step makes one of."""
        rows = zip(self.roles.gradients, self.takers, strict=True)
        return [None if taker is None else taker.grad for role, taker in rows if role.kind == "gradient"]

    def _begin(self) -> None:
        """Have those ready that update parameters, or sum gradients over ranks, in this backward."""
        step, flight = self.step, self.flight
        if self.fused is not None:
            flight.update = self.fused.begin(self.updated, self.tangents, self.keep)
        if step.inside is not None and self.roles.shards:
            flight.met()
            flight.exchange = step.inside.begin(
                {
                    name: _taker(self.behind[i][0])
                    for name, i in self.roles.exchanged.items()
                    if not step.is_without(Output("gradient", name), self.unused)
                }
            )

    def _made(self, added: Sequence[Tensor | None]) -> list[Tensor]:
        """All that the half returns, once every update in it is done."""
        step, flight = self.step, self.flight
        if self.roles.shards:
            flight.halves = step.halves
            added = [*added, *(map(step.shard, self.roles.shards) if self.roles.adds else ())]
        else:
            flight.halves = step.halves_without(self.unused)
        found = flight.backward(self.tangents, added, self.keep)
        if self.fused is not None:
            self.fused.finish()
        return found

    def _parted(self, found: list[Tensor]) -> list[Tensor]:
        """The gradients; this rank's parts of what ranks have summed stay with who sums."""
        count = len(self.roles.gradients)
        if self.step.inside is not None and self.roles.shards:
            self.step.inside.give(dict(zip(self.roles.shards, found[count:], strict=True)))
        return found[:count]

    def _given(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Put gradients where they belong; what autograd has to hand on is returned."""
        rows = zip(self.roles.gradients, self.takers, gradients, self.gone, strict=True)
        return [
            _nothing(self.behind[self.roles.target(role)][0], gradient) if gone else _give(taker, gradient)
            for role, taker, gradient, gone in rows
        ]


def _taker(node: Any) -> Tensor | None:
    """The parameter of an autograd node that would only accumulate into its `.grad`, if nobody is told of it.

    A data-parallel wrapper hooks the node itself, as DDP does: it is called all the same, after the step's own node,
    and reads what is in `.grad` by then.
    """
    parameter: Tensor | None = getattr(node, "variable", None)
    if parameter is None or has_hooks(parameter) or _is_frozen(node):
        return None
    try:
        return parameter if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch.autograd.grad asks for this gradient
        return None


def _is_frozen(node: Any) -> bool:
    """Whether it is of a parameter that was frozen since forward, for which autograd drops what comes."""
    parameter: Tensor | None = getattr(node, "variable", None)
    return parameter is not None and not parameter.requires_grad


def _nothing(node: Any, gradient: Tensor) -> Tensor | None:
    """What autograd hands on of a gradient that eager would not have made: nothing; but zeros to a hook, and to what
    comes before the module, which would be called all the same."""
    leaf = getattr(node, "variable", None)
    return gradient.zero_() if leaf is None or has_hooks(leaf) else None


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
