"""Capture a call of a module as the graph of a whole step.

    model(x, labels=y)   ->   parameters, buffers, x, y, tangents -> forward ops, backward ops -> outputs, gradients

The call is traced on fake tensors, forward and backward at once, then made functional, then put in order. All that is
not a tensor is a constant of the graph: a caller that reuses the graph must compare it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor

from ..errors import CaptureError
from ..graph.accumulate_grads import sum_grads_early
from ..graph.aten_shims import copy_only_inputs
from ..graph.captured import Captured, Input, Output, Ref
from ..graph.float_arguments import float_inputs
from ..graph.guard_ops import value_guards
from ..graph.nodes import returned_values
from ..graph.opaque_ops import with_parts
from ..opaque.chosen_parts import OpaqueParts
from ..opaque.recorder import Recorder
from ..system.frames import source_line
from ..tensors.loss_outputs import OutputSelector, select_all, select_losses, select_scalars
from ..tensors.traced_number import TracedFloat, TracedInt
from .call import Call
from .constant_fake_mode import ConstantFakeMode
from .explain_errors import explain_error
from .fake_tensors import fake_mode_context
from .finalize import finalize_graph
from .floats.float_inputs import FloatInputs
from .floats.type_checks import TypeChecks
from .functionalize import functionalize
from .joint.joint_graph import JointGraph
from .joint.trace_joint import trace_joint
from .python_state.refuse_reseeding import refuse_reseeding
from .python_state.refused_draws import refuse_python_random
from .reentrant_forward import can_run_again
from .saved.capture_files import call_kind, find_capture, keep_capture
from .saved.op_log import OpLog
from .sizes.size_inputs import SizeInputs, name_sizes
from .user_checkpoint import as_in_eager
from .values.questions import ValuesNeeded, is_number
from .values.value_run import Measure, ValueRun, run_for_values

__all__ = [
    "Captured",
    "Input",
    "Output",
    "OutputSelector",
    "Ref",
    "capture",
    "operands",
    "select_all",
    "select_losses",
    "select_scalars",
]


LOG = logging.getLogger(__name__)


def _unmeasured(run: Callable[[], object]) -> int:
    run()
    return 0


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    grad: bool = True,
    wanted: OutputSelector = select_all,
    floats: FloatInputs | None = None,
    sizes: SizeInputs | None = None,
    measure: Measure = _unmeasured,
    opaque: bool | Sequence[str] = False,
) -> Captured:
    """Capture the step of `module(*args, **kwargs)`; nothing is changed.

    No real tensor is read, unless Python asks for the value of one. Then forward runs once, inside `measure`, and the
    graph has guards.

    `opaque` submodules run as they are: those at these paths, and unless it is False, those that can't be traced.

    With `grad`, backward starts from those differentiable outputs that `wanted` selects. It starts from all of them if
    the selection is a guess and forward could not be run again for the others. `floats` of the call become inputs of
    the graph instead of constants, and `sizes` symbols.

    Raises:
        CaptureError: the call can't be captured.
        ValueNeededError: forward or backward needs the value of one of the `floats`.
        SizeNeededError: it needs the value of one of the `sizes`.
        ValuesNeeded: with `sizes`, Python asks for the value of a tensor.
    """
    tracer = _Tracer(module, args, kwargs, grad, floats, sizes, measure, OpaqueParts(module, opaque, as_in_eager))
    try:
        return tracer.sure(wanted)
    finally:
        tracer.parts.close()
        gc.collect(1)  # a trace is garbage with cycles, and holds small constants of the model's


@dataclass
class _Tracer:
    """Traces a call, and once it has asked for values or can't trace a submodule, with what a real run recorded."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    floats: FloatInputs | None
    sizes: SizeInputs | None
    measure: Measure
    parts: OpaqueParts
    values: ValueRun | None = None
    needed: str = ""  # why numbers that forward reads from tensors can't vary
    needs_values: bool = False

    def sure(self, wanted: OutputSelector) -> Captured:
        """Return the captured step; for all outputs, if a wrong guess could not be made good by a second forward."""
        captured = self.captured(wanted)
        is_sure = len(captured.tangents) == len(captured.differentiable) and not captured.speculative_outputs
        if is_sure or wanted not in (select_losses, select_scalars) or can_run_again(captured):
            return captured
        return self.captured(select_all)

    def captured(self, wanted: OutputSelector) -> Captured:
        while True:
            try:
                if self.needs_values or (self.parts.recorder is None and self.parts.reasons):
                    self._run()
                with self.sizes.tracing() if self.sizes is not None else nullcontext():
                    return self._traced(wanted)
            except ValuesNeeded as error:
                if self.sizes is not None:
                    raise  # such a call is captured with constant sizes
                if self.values is not None:
                    raise _backward_error(error) from None
                self.needs_values = True
            except CaptureError as error:
                self.parts.add(error)

    def _traced(self, wanted: OutputSelector) -> Captured:
        """Trace with stand-ins for the numbers that forward reads; with the numbers themselves if that fails."""
        given = self.module, self.args, self.kwargs, self.grad, wanted, self.floats, self.sizes
        traced = partial(_captured, *given, self.values, self.parts.recorder)
        if self.needed or self.values is None or not any(map(is_number, self.values.answers)):
            return traced()
        checks = TypeChecks((TracedFloat, TracedInt))
        try:
            with checks.watching():
                captured = traced(has_numbers=True)
            if not checks.found:
                return captured
            needed = f"the type or identity of one may be checked at {checks.found}"
        except Exception as error:  # the trace with numbers will say what is wrong with the call
            needed = f"{error.__cause__ or error}"
        captured, self.needed = traced(), needed
        LOG.info("numbers that forward reads from tensors are guarded by their values: %s", needed)
        return captured

    def _run(self) -> None:
        self.needs_values = False
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            call = Call.of(self.module, self.args, self.kwargs)
            if any(isinstance(tensor, FakeTensor) for tensor in call.tensors):
                raise CaptureError("forward branches on values of tensors, and shapes alone have none: give a batch")
            self.values = run_for_values(call, self.measure, self.parts.recording)


def _captured(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, wanted: OutputSelector,
    floats: FloatInputs | None, sizes: SizeInputs | None, values: ValueRun | None, recorder: Recorder | None,
    has_numbers: bool = False,
) -> Captured:  # fmt: skip
    call = Call.of(module, args, kwargs)
    if floats is not None:
        call = replace(call, leaves=floats.in_leaves(call.leaves))
    grad = grad and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    is_plain = floats is None and sizes is None and values is None and recorder is None
    kind = call_kind(call, grad, wanted) if is_plain else ""
    if (found := find_capture(kind, call, grad, wanted)) is not None:
        return _described(*found, wanted)
    log, answers = OpLog(), values.answers if values is not None else None
    mode = ConstantFakeMode(floats is not None, answers, has_numbers, sizes)
    with (
        fake_mode_context(mode),
        refuse_python_random(module),
        torch.set_grad_enabled(grad),
        explain_error(module, mode),
    ):
        with refuse_reseeding(module), floats.in_attributes() if floats is not None else nullcontext():
            joint = trace_joint(call, mode, wanted, log, recorder)
        functional = functionalize(joint, module)
        copy_only_inputs(functional.graph.graph, mode)
        _refuse_shared(call, functional.changed)
        graph = finalize_graph(functional, joint)
        sum_grads_early(graph.graph)
        if sizes is not None:
            name_sizes(graph.graph)
    keep_capture(kind, log, graph)
    captured = _described(joint, graph, wanted)
    if values is not None or recorder is not None:
        parts = tuple(recorded.part for recorded in recorder.calls) if recorder is not None else ()
        captured = replace(
            captured, guards=with_parts(value_guards(graph.graph), parts), opaque=parts,
            value_run_nbytes=values.nbytes if values is not None else 0,
        )  # fmt: skip
    if floats is None:
        return captured
    special_values = tuple(floats.trace.special_values)
    return replace(captured, floats=float_inputs(graph.graph), special_values=special_values)


def _described(joint: JointGraph, graph: fx.GraphModule, wanted: OutputSelector) -> Captured:
    tangents = tuple(role.index for role in joint.inputs if role.kind == "tangent")
    speculative = _speculative_outputs(graph, tangents) if wanted is select_losses else ()
    return Captured(
        graph, joint.inputs, joint.outputs, joint.leaves, joint.spec, joint.differentiable, tangents, speculative,
        sources=joint.sources, has_custom_functions=joint.has_custom_functions, rewritten=joint.rewritten,
        counters=joint.counters,
    )  # fmt: skip


def operands(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the real tensors for the placeholders of a captured call, without the tangents."""
    return Call.of(module, args, kwargs).tensors


def _backward_error(error: ValuesNeeded) -> CaptureError:
    return CaptureError(
        f"the step can't be captured at {source_line(error.__traceback__)}: in backward, a shape or a number depends "
        "on a tensor's values\ncompute with torch.where or a mask, or do this outside of the module"
    )


def _speculative_outputs(graph: fx.GraphModule, tangents: Sequence[int]) -> tuple[int, ...]:
    outputs = returned_values(graph.graph)
    scalars = {place for place in tangents if outputs[place].meta["val"].numel() == 1}
    return tuple(place for place in tangents if place not in scalars) if scalars else ()


def _refuse_shared(call: Call, changed: dict[int, fx.Node]) -> None:
    """Raise if forward changes a tensor that shares memory with another: the graph would not see the change there."""
    storages = [tensor.untyped_storage()._cdata for tensor in call.tensors]
    for i in changed:
        for j, role in enumerate(call.inputs):
            if i != j and storages[i] == storages[j]:
                names = f"{call.inputs[i].label} in place, which shares its memory with {role.label}"
                raise CaptureError(f"forward changes {names}: clone one of them")
