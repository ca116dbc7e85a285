"""The autograd node of a step, whose backward runs the step's backward half.

    outputs = StepFunction.apply(differentiation, *tensors)    the forward half has run
    loss.backward()                                            the backward half runs

Gradients of parameters are put into `.grad` here, unless a hook has to see them; autograd passes the others on.

Let the stream of whoever calls backward wait for the gradients.

    with torch.cuda.stream(side):     y = model(x)      # backward of these ops runs on `side`
    y.backward()                                        # the caller's stream waits for `side` when it returns
    optimizer.step()                                    # reads gradients that are complete

autograd does so for gradients that it accumulates itself. A step writes them, and would be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph

from ..errors import MemgraphError
from ..graph.captured import Output
from ..guards.owned_tensors import has_hooks
from ..guards.signature import in_process_group
from ..profile.memory_meter import resident_bytes
from ..report.report import Report
from ..system.device import CPU
from ..system.user_warning import warn_user
from .concurrent_runs import count_passed_on, note_concurrent_run
from .released_outputs import BorrowedOutputs, refuse_kept, releases_outputs
from .step_parts import StepParts
from .step_run import StepRun, differentiated_before


@dataclass(frozen=True)
class OtherOutputs:
    """The two reactions to gradients for other outputs than planned.

    Attributes:
        more: returns the gradients of all inputs.
        fewer: is called before a backward that takes the place of the planned one, and does less.
    """

    more: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
    fewer: Callable[[], object]


@dataclass(frozen=True, eq=False)
class Differentiation:
    """One run of a step, as its autograd node needs it.

    Attributes:
        report: of the plan that this run carries out.
        finish: closes the run.
    """

    parts: StepParts
    report: Report
    run: StepRun
    finish: Callable[[StepRun], None]
    other_outputs: OtherOutputs


class StepFunction(torch.autograd.Function):
    """A step, as autograd calls it."""

    boxed_grads_call = True  # tangents arrive in a list, from which each is removed when it has been read

    @staticmethod
    def forward(ctx: Any, this: Differentiation, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.this, ctx.tensors = this, tensors
        run, parts = this.run, this.parts
        try:
            outputs = run.forward(tensors, parts.roles.outputs)
        except BaseException:
            this.finish(run)
            raise
        differentiable = parts.captured.differentiable
        # A view of an output that is differentiable would get that one's autograd node.
        outputs = [x.detach() if i not in differentiable and x._is_view() else x for i, x in enumerate(outputs)]
        if releases_outputs(this.report) or run.meter is not None:
            run.borrowed = BorrowedOutputs(outputs)
        note_concurrent_run(run, frozenset(id(tensors[i]) for i in parts.roles.owners))
        ctx.mark_non_differentiable(*(x for i, x in enumerate(outputs) if i not in differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        tangents: list[Tensor | None] = given[0] if given and isinstance(given[0], list) else list(given)
        if ctx.this is None and all(tangent is None for tangent in tangents):
            return (None,) * len(ctx.needs_input_grad)  # a later step has read an output, and cut it off
        if ctx.this is None:
            raise differentiated_before()
        this: Differentiation = ctx.this
        roles = this.parts.roles
        if torch.is_grad_enabled():
            raise MemgraphError(
                "the gradients of a memgraph module can't be differentiated again (create_graph=True): "
                "its backward is a graph of its own; use the plain module for this"
            )
        results: list[Tensor | None] = [None] * len(ctx.tensors)
        is_last = bool(roles.updates) or not _get_current_graph_task_keep_graph()
        if any(tangent is not None and i not in roles.tangents for i, tangent in enumerate(tangents)):
            if is_last:
                this.finish(this.run)  # no backward will read what it saved
            results[:] = this.other_outputs.more(tangents)
        else:
            if any(tangents[i] is None for i in this.parts.captured.speculative_outputs):
                this.other_outputs.fewer()
            backward = BackwardPass(ctx, tangents)
            try:
                with this.run.measured(backward.tangents):
                    gradients = backward.run_half()
            finally:
                backward.finish()
            for place, gradient in zip(roles.targets, gradients, strict=True):
                results[place] = gradient
            wait_at_end(next((tensor.device for tensor in ctx.tensors), CPU))
        if is_last:
            # A loss that the caller keeps, as most loops do until the next call returns, would keep this batch too.
            ctx.this = ctx.tensors = None
        return None, *results


class BackwardPass:
    """One backward through a run.

    Attributes:
        owners: for each gradient, the parameter whose `.grad` takes it; None where autograd has to pass it on.
        missing: for each gradient, True if eager would make none, since no gradient reaches what it is computed from.
    """

    def __init__(self, ctx: Any, tangents: list[Tensor | None]) -> None:
        self.this: Differentiation = ctx.this
        self.parts, self.run, self.report = self.this.parts, self.this.run, self.this.report
        self.roles = self.parts.roles
        self.inputs: Sequence[Tensor] = ctx.tensors
        if self.run.borrowed is not None and releases_outputs(self.report):
            kept = refuse_kept(self.run.borrowed, tangents, self.run.saved_tensors(), self.report)
            self.run.unplanned = self.run.unplanned or kept
        self.tangents = [tangents[i] for i in self.roles.tangents]
        self.unused = frozenset(i for i in self.roles.tangents if tangents[i] is None)
        self.keep = _get_current_graph_task_keep_graph()
        self.next_nodes = ctx.next_functions  # a property that builds a new tuple at each access
        concurrent = self.run.is_concurrent
        self.owners = [
            _owner(self.next_nodes[place][0]) if role.kind == "gradient" and not concurrent else None
            for role, place in zip(self.roles.gradients, self.roles.targets, strict=True)
        ]
        self.fused_update = self.parts.fused_update if self.roles.updates else None
        updated = {name: self.next_nodes[i][0] for name, i in self.roles.updates.items()}
        is_seen = concurrent or in_process_group()  # a process group may average gradients before they are used
        self.updated = {
            name: None if is_seen else _owner(node) for name, node in updated.items() if not _is_frozen(node)
        }
        self.outside_nbytes = self.run.outside.peak if self.run.outside is not None else 0
        self.missing = [self.parts.is_missing(role, self.unused) for role in self.roles.gradients]
        tangents.clear()

    def run_half(self) -> list[Tensor | None]:
        """Run the backward half, and return the gradients that autograd has to pass on."""
        parts, run, slots = self.parts, self.run, self.parts.state_slots
        if run.meter is not None:
            run.absent_nbytes = min(run.absent_nbytes, parts.absent_nbytes(self.inputs))
            if run.is_concurrent:
                parts.note_others(run, self.inputs)
        apart: Mapping[int, Tensor] = {}
        if slots is not None:
            apart, places = slots.begin_backward(self.owners, self.roles.adds)
            run.bind(places)
        added = self._existing_gradients() if self.roles.adds else []
        self._warn()
        try:
            self._begin()
            gradients = self._without_shards(self._computed(added))
            if slots is not None:  # which joins blocks
                kept = [None if gone else owner for owner, gone in zip(self.owners, self.missing, strict=True)]
                gradients = slots.finish_backward(gradients, kept, apart, run.slot_layouts)
        except BaseException as error:
            if self.fused_update is not None:
                self.fused_update.abort(error)
            raise
        passed_on = self._assigned(gradients)
        if run.is_concurrent:
            count_passed_on([gradient for gradient in passed_on if gradient is not None])
        return passed_on

    def finish(self) -> None:
        """Close the run, unless another backward may go through it."""
        if not self.keep or self.roles.updates:
            self.this.finish(self.run)

    def _warn(self) -> None:
        """Warn if what no plan counts exceeds the budget: a kept graph, gradients beside existing ones, a loss."""
        forecast, nbytes = self.report.forecast, self._unused_gradients_nbytes()
        outside = self.outside_nbytes
        if outside and self.run.held_nbytes + outside > self.report.budget:
            self.run.note_outside()
            said = (
                f"what is computed between forward and backward, as a loss outside of the model, takes {outside} bytes"
            )
            unless = "the model computes its loss (memgraph.compile does so with loss=), which is planned then"
            self._warn_over(self.run.held_nbytes + outside, said, unless)
        if self.keep:
            said = "backward(retain_graph=True) keeps all that forward saved"
            self._warn_over(forecast.retained, said, "each forward has one backward")
        if nbytes:
            self.run.unplanned = "new gradients were made beside existing ones"
            said = "torch.autograd.grad and backward(inputs=...) make gradients beside the existing ones"
            self._warn_over(forecast.peak + nbytes, said, "no gradients exist when forward begins")

    def _warn_over(self, nbytes: int, said: str, unless: str) -> None:
        budget = self.report.budget
        if nbytes > budget:
            over = f"this step may take {nbytes} bytes, over its budget of {budget}; it is within it if {unless}"
            warn_user(f"{said}: {over}")

    def _unused_gradients_nbytes(self) -> int:
        """Return the bytes of existing gradients that the plan adds to, but this backward does not."""
        if not self.roles.adds or self.run.is_concurrent:
            return 0
        rows = zip(self.roles.gradients, self.roles.targets, self.owners, strict=True)
        places = [place for role, place, owner in rows if role.kind == "gradient" and owner is None]
        left = [parameter for parameter in map(self.inputs.__getitem__, places) if not has_hooks(parameter)]
        return resident_bytes(parameter.grad for parameter in left if parameter.grad is not None)

    def _existing_gradients(self) -> list[Tensor | None]:
        """Return the gradient to add to, for each gradient of a parameter."""
        rows = zip(self.roles.gradients, self.owners, strict=True)
        existing = [None if owner is None else owner.grad for role, owner in rows if role.kind == "gradient"]
        return self.parts.gradients_in_blocks(existing)

    def _begin(self) -> None:
        """Prepare what updates parameters, or averages gradients over ranks, during this backward."""
        parts, run = self.parts, self.run
        if self.fused_update is not None:
            run.update = self.fused_update.begin(self.updated, self.tangents, self.keep)
        if parts.sharded_grads is not None and self.roles.shards:
            run.check_ranks()
            run.exchange = parts.sharded_grads.begin_backward(
                {
                    name: _owner(self.next_nodes[i][0])
                    for name, i in self.roles.exchanged.items()
                    if not parts.is_missing(Output("gradient", name), self.unused)
                }
            )

    def _computed(self, added: Sequence[Tensor | None]) -> list[Tensor]:
        """Return all results of the half, once every update in it is done."""
        parts, run = self.parts, self.run
        if self.roles.shards:
            run.halves = parts.halves
            added = [*added, *(map(parts.shard, self.roles.shards) if self.roles.adds else ())]
        else:
            run.halves = parts.halves_without(self.unused)
        results = run.backward(self.tangents, added, self.keep)
        if self.fused_update is not None:
            self.fused_update.finish()
        return results

    def _without_shards(self, results: list[Tensor]) -> list[Tensor]:
        """Return the gradients; this rank's shards of averaged buckets go to the sharded optimizer."""
        count = len(results) - len(self.roles.shards)
        if self.parts.sharded_grads is not None and self.roles.shards:
            self.parts.sharded_grads.add_shards(dict(zip(self.roles.shards, results[count:], strict=True)))
        return results[:count]

    def _assigned(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Put gradients into `.grad`, and return what autograd has to pass on."""
        rows = zip(self.roles.targets, self.owners, gradients, self.missing, strict=True)
        return [
            _passed_if_missing(self.next_nodes[place][0], gradient) if gone else _give(owner, gradient)
            for place, owner, gradient, gone in rows
        ]


def _owner(node: Any) -> Tensor | None:
    """Return the parameter of an autograd node that would only accumulate into its `.grad`, unless a hook sees it.

    A data-parallel wrapper such as DDP hooks the node itself.  Its hook still runs, after the step's own node, and
    reads `.grad`.
    """
    parameter: Tensor | None = getattr(node, "variable", None)
    if parameter is None or has_hooks(parameter) or not parameter.requires_grad:  # it was frozen since forward
        return None
    try:
        return parameter if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch.autograd.grad asks for this gradient
        return None


def _is_frozen(node: Any) -> bool:
    """Return True for a parameter that was frozen since forward: autograd drops its gradient."""
    parameter: Tensor | None = getattr(node, "variable", None)
    return parameter is not None and not parameter.requires_grad


def _passed_if_missing(node: Any, gradient: Tensor) -> Tensor | None:
    """Return what autograd passes on for a gradient that eager would not make: None; zeros where a hook, or a module
    before this one, is called all the same."""
    leaf = getattr(node, "variable", None)
    return gradient.zero_() if leaf is None or has_hooks(leaf) else None


def _give(owner: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Accumulate a gradient into its owner's `.grad` as autograd would; without an owner, return it."""
    if owner is None:
        return gradient
    before = owner.grad
    if before is None:
        owner.grad = gradient
    elif before is not gradient:
        before.add_(gradient)
    return None


def wait_at_end(device: torch.device, cuda: Any = torch.cuda) -> None:
    """Let the caller's stream wait, at the end of the running backward, for what this stream has been asked to do.

    `cuda` is torch.cuda, or a stand-in with its streams and events.
    """
    if device.type != "cuda":
        return
    done = cuda.Event()
    done.record(cuda.current_stream(device))

    def wait() -> None:  # called with the caller's streams as the current ones
        cuda.current_stream(device).wait_event(done)

    torch.autograd.Variable._execution_engine.queue_callback(wait)
