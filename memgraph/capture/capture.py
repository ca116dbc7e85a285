"""Capture a call of a module as the graph of a whole step.

    model(x, labels=y)   ->   parameters, buffers, x, y, tangents -> forward ops, backward ops -> outputs, gradients

The call is traced on fake tensors, forward and backward at once, then made functional, then put in order. All that is
not a tensor is a constant of the graph: a caller that reuses the graph must compare it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import CaptureError
from ..graph.accumulate_grads import sum_grads_early
from ..graph.aten_shims import copy_only_inputs
from ..graph.captured import Captured, Input, Output, Ref
from ..graph.float_arguments import float_inputs
from ..graph.guard_ops import value_guards
from ..graph.nodes import returned_values
from ..system.frames import source_line
from ..tensors.loss_outputs import OutputSelector, select_all, select_losses, select_scalars
from .call import Call
from .constant_fake_mode import ConstantFakeMode
from .explain_errors import explain_error
from .fake_tensors import fake_mode_context
from .finalize import finalize_graph
from .float_inputs import FloatInputs
from .functionalize import functionalize
from .reentrant_forward import can_run_again
from .refuse_reseeding import refuse_reseeding
from .trace_joint import trace_joint
from .value_modes import ValuesNeeded
from .value_run import Measure, ValueRun, run_for_values

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
    measure: Measure = _unmeasured,
) -> Captured:
    """Capture the step of `module(*args, **kwargs)`; nothing is changed.

    No real tensor is read, unless Python asks for the value of one. Then forward runs once, inside `measure`, and the
    graph has guards.

    With `grad`, backward starts from those differentiable outputs that `wanted` selects. It starts from all of them if
    the selection is a guess and forward could not be run again for the others. `floats` of the call become inputs of
    the graph instead of constants.

    Raises:
        CaptureError: the call can't be captured.
        ValueNeededError: forward or backward needs the value of one of the `floats`.
    """
    tracer = _Tracer(module, args, kwargs, grad, floats, measure)
    captured = tracer.captured(wanted)
    is_sure = len(captured.tangents) == len(captured.differentiable) and not captured.speculative_outputs
    if is_sure or wanted not in (select_losses, select_scalars) or can_run_again(captured):
        return captured
    return tracer.captured(select_all)


@dataclass
class _Tracer:
    """Traces a call, and once it has asked for values, with these."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    floats: FloatInputs | None
    measure: Measure
    values: ValueRun | None = None

    def captured(self, wanted: OutputSelector) -> Captured:
        traced = partial(_captured, self.module, self.args, self.kwargs, self.grad, wanted, self.floats)
        try:
            return traced(self.values)
        except ValuesNeeded as error:
            if self.values is not None:
                raise _backward_error(error) from None
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            self.values = run_for_values(Call.of(self.module, self.args, self.kwargs), self.measure)
        return traced(self.values)


def _captured(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, wanted: OutputSelector,
    floats: FloatInputs | None, values: ValueRun | None,
) -> Captured:  # fmt: skip
    call = Call.of(module, args, kwargs)
    if floats is not None:
        call = replace(call, leaves=floats.in_leaves(call.leaves))
    grad = grad and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    mode = ConstantFakeMode(has_floats=floats is not None, answers=values.answers if values is not None else None)
    with fake_mode_context(mode), torch.set_grad_enabled(grad), explain_error(module, mode):
        with refuse_reseeding(module), floats.in_attributes() if floats is not None else nullcontext():
            joint = trace_joint(call, mode, wanted)
        functional = functionalize(joint, module)
        copy_only_inputs(functional.graph.graph, mode)
        _refuse_shared(call, functional.changed)
        graph = finalize_graph(functional, joint)
        sum_grads_early(graph.graph)
    tangents = tuple(role.index for role in joint.inputs if role.kind == "tangent")
    speculative = _speculative_outputs(graph, tangents) if wanted is select_losses else ()
    captured = Captured(
        graph, joint.inputs, joint.outputs, joint.leaves, joint.spec, joint.differentiable, tangents, speculative,
        sources=joint.sources, has_custom_functions=joint.has_custom_functions, rewritten=joint.rewritten,
        counters=joint.counters,
        guards=value_guards(graph.graph), value_run_nbytes=values.nbytes if values is not None else 0,
    )  # fmt: skip
    if floats is None:
        return captured
    special_values = tuple(floats.trace.special_values)
    return replace(captured, floats=float_inputs(graph.graph), special_values=special_values)


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
