"""The captured step of one micro-batch, priced, with its loss as the only output.

model(x, labels=y)   ->   Captured, and the costs of each stage that it can be cut into
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes import Machine, Trace
from passes.ir.liveness import RELEASED
from passes.stages.interval_costs import IntervalCosts
from passes.stages.places import Places, by_module
from passes.stages.stage_trace import stage_trace

from ..capture.capture import capture
from ..capture.explain_errors import refuse_hooks
from ..errors import CaptureError
from ..graph.captured import Captured
from ..graph.gradient_sums import gradient_sums
from ..graph.nodes import all_storages, returned_values, storages, written_inputs
from ..graph.summarize import summarize
from ..guards.signature import forward_hooks, parameters_with_grad_hooks
from ..profile.correct_fakes import apply_profiled_layouts
from ..profile.library_workspaces import libraries_nbytes
from ..profile.op_profiler import OpProfiler, nominal_us
from ..system.device import device_of, unused_nbytes
from ..system.disturbance import note_disturbed
from ..system.locks import capturing
from ..tensors.loss_outputs import select_losses

REFUSED = "a pipeline can't be made of a model that"
KINDS = {RELEASED: "output", "input_gradient": "watched"}  # what a stage sends is not released early, nor offloaded


@dataclass(frozen=True, eq=False)
class WholeStep:
    """The step that is cut.

    Attributes:
        loss: the name of the value from which backward starts.
        loss_output: its place among the outputs of the model.
        machine: that the ranks plan for; its budget is that of no rank.
        drawn: how many random numbers each op draws; None if that is not known before.
    """

    captured: Captured
    trace: Trace
    loss: str
    loss_output: int
    machine: Machine = field(default_factory=lambda: Machine(0))
    drawn: dict[str, int] | None = field(default_factory=dict)

    @property
    def draws(self) -> bool:
        """Return True if an op draws random numbers."""
        return self.drawn is None or any(self.drawn.values())

    @cached_property
    def costs(self) -> IntervalCosts:
        nodes = {name: value for value, name in self.tensors.items()}
        owners = {value: nodes[name] for name, value in self._gradients}
        return IntervalCosts(Places(self.trace, gradient_sums(self.captured), owners, self._modules))

    @property
    def _modules(self) -> list[list[str]]:
        """Return the inputs of each module without parts."""
        nodes, found = {name: value for value, name in self.tensors.items()}, by_module(self.tensors.values())
        parents = {path.rpartition(".")[0] for path in found if path}
        return [[nodes[name] for name in names] for path, names in found.items() if path not in parents]

    @cached_property
    def nominal(self) -> WholeStep:
        """The step with prices that no process measures: with these each one finds the same cut and the same plans."""
        nodes = {node.name: node for node in self.captured.graph.graph.nodes}
        ops = tuple(replace(op, us=nominal_us(nodes[op.name])) for op in self.trace.ops)
        return replace(self, trace=replace(self.trace, ops=ops), machine=self.machine.nominal)

    @property
    def copy_us(self) -> float:
        """Return the least time that a plan takes to offload and reload a byte; infinite without a tier."""
        return 2 * self.machine.link.us_per_byte if self.machine.link.works else math.inf

    @cached_property
    def ops(self) -> list[str]:
        """Return a line for each op, without prices: equal on all ranks that captured the same step."""
        return [f"op {i} of the step: {op.name} = {op.fn} of {op.reads}" for i, op in enumerate(self.trace.ops)]

    @cached_property
    def gradients(self) -> dict[str, str]:
        """Map each gradient, and each term of one that is a sum, to its parameter."""
        return {term: name for name, value in self._gradients for term in self.costs.places.terms(value)}

    @property
    def _gradients(self) -> list[tuple[str, str]]:
        """Return each parameter that gets a gradient, with the gradient."""
        roles = zip(self.captured.outputs, returned_values(self.captured.graph.graph), strict=True)
        return [(role.name, node.name) for role, node in roles if role.kind == "gradient"]

    @cached_property
    def input_gradients(self) -> dict[str, str]:
        """Map each gradient of a tensor of the batch to the input that the tensor is."""
        placeholders = self.captured.graph.graph.find_nodes(op="placeholder")
        inputs = zip(placeholders, self.captured.inputs, strict=True)
        names = {role.index: node.name for node, role in inputs if role.kind == "input"}
        roles = zip(self.captured.outputs, returned_values(self.captured.graph.graph), strict=True)
        return {node.name: names[role.index] for role, node in roles if role.kind == "input_gradient"}

    @cached_property
    def tensors(self) -> dict[str, str]:
        """Map the inputs that are parameters or buffers to their names in the module."""
        placeholders = self.captured.graph.graph.find_nodes(op="placeholder")
        inputs = zip(placeholders, self.captured.inputs, strict=True)
        return {node.name: role.name for node, role in inputs if role.kind in ("parameter", "buffer")}

    def measured(self, us: Sequence[float], drawn: dict[str, int] | None, machine: Machine) -> WholeStep:
        """Return the step with what rank 0 has measured: ranks that plan with the same times find the same plans."""
        ops = (replace(op, us=time) for op, time in zip(self.trace.ops, us, strict=True))
        return replace(self, trace=replace(self.trace, ops=tuple(ops)), drawn=drawn, machine=machine)

    def stage(self, begin: int, end: int) -> Trace:
        """Return the trace of a stage. What it sends stays until backward: the receiver may be late."""
        trace = stage_trace(self.costs.places, begin, end)
        outputs = ((KINDS.get(kind, kind), value) for kind, value in trace.outputs)
        return replace(trace, outputs=tuple(dict.fromkeys(outputs)))


def whole_step(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_output: int | None = None
) -> WholeStep:
    """Capture and price the step of one micro-batch.

    Args:
        loss_output: the place of the loss among the model's outputs, which a call without gradients does not tell.

    Raises:
        CaptureError: it can't be captured, or is of a kind that can't be cut.
    """
    refuse_hooks(module)
    _refuse_forward_hooks(module)
    if hooked := sorted(parameters_with_grad_hooks(module)):
        raise CaptureError(f"stages add to gradients themselves, and the hook on that of {hooked[0]} would not run")
    with capturing(module):
        captured = capture(module, args, kwargs, grad=torch.is_grad_enabled(), wanted=select_losses)
    _refuse(captured)
    graph, device = captured.graph.graph, device_of([*module.parameters(), *module.buffers()])
    place = _loss_output(captured, loss_output)
    loss = returned_values(graph)[place].name
    libraries_nbytes(device)
    profiler = OpProfiler(unused_nbytes(device) // 2, fixed_modes=True)
    apply_profiled_layouts(graph, profiler.layouts)
    trace = summarize(graph, profiler)
    note_disturbed([profiler.doubt])
    outputs = tuple(each for each in trace.outputs if each == ("output", loss) or each[0] in ("gradient", "watched"))
    return WholeStep(captured, replace(trace, outputs=outputs), loss, place)


def _refuse_forward_hooks(module: nn.Module) -> None:
    """
    Raises:
        CaptureError: a submodule has a hook of the caller's, which would run while it is captured, and never again.
    """
    for name, _ in forward_hooks(module):
        raise CaptureError(
            f"{REFUSED} has forward hooks, as {name or 'the model'} has: stages run captured ops, and would "
            "never call them; do in forward what they do, or remove them before the first step"
        )


def _writes_batch(captured: Captured) -> bool:
    """Return True if an op writes to a tensor of the batch."""
    nodes = captured.graph.graph.find_nodes(op="placeholder")
    given = all_storages(node for node, role in zip(nodes, captured.inputs, strict=True) if role.kind == "input")
    return any(
        not given.isdisjoint(storages(each)) for node in captured.graph.graph.nodes for each in written_inputs(node)
    )


def _refuse(captured: Captured) -> None:
    """
    Raises:
        CaptureError: stages are not built for such a step.
    """
    for part in captured.opaque:
        raise CaptureError(f"{REFUSED} has submodules that can't be traced: {part.path}, {part.reason}")
    for guard in captured.guards:
        raise CaptureError(
            f"{REFUSED} branches on the value of a tensor: {guard.assumption} at {guard.where or 'a line of forward'}; "
            "all micro-batches run one graph, so compute both branches and choose with torch.where"
        )
    if captured.rewritten or _writes_batch(captured):
        raise CaptureError(f"{REFUSED} writes into a tensor of the batch; let it clone that before")
    for write in captured.writes.items:
        if write.holds_tensors or not (write.settles or captured.writes.repeats or not write.is_read):
            raise CaptureError(f"{REFUSED} stores a tensor, or what its next call reads, in {write.where}")
        if write.counts:
            raise CaptureError(f"{REFUSED} counts its calls in Python, in {write.where}; make that a buffer")


def _loss_output(captured: Captured, known: int | None) -> int:
    """Return the place of the loss among the model's outputs.

    Raises:
        CaptureError: there is no loss.
    """
    results = returned_values(captured.graph.graph)
    places = captured.tangents or (() if known is None else (known,))
    if len(places) == 1 and _is_number(results[places[0]]):
        return places[0]
    shapes = [tuple(results[place].meta["val"].shape) for place in captured.tangents]
    several = f"{len(shapes)} tensors that need a gradient" + (f", of shapes {shapes}" if shapes else "")
    found = several if known is None else "none where the first had it"
    raise CaptureError(
        f"a pipeline starts backward from one number, its loss, and the model's result has {found}; give loss=, or let "
        "the model return its loss"
    )


def _is_number(result: Any) -> bool:
    value = result.meta["val"] if isinstance(result, fx.Node) else None
    return isinstance(value, Tensor) and value.numel() == 1
