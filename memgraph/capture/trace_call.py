"""Trace a call once, and make the graph of its step.

call   ->   first trace   ->   functional graph   ->   final graph   ->   Captured
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..graph.aten_shims import copy_only_inputs
from ..graph.captured import Captured
from ..graph.gradient_sums import sum_grads_early
from ..opaque.recorder import Recorder
from ..tensors.loss_outputs import OutputSelector
from .assemble import assemble, with_floats, with_guards
from .call.call import Call
from .constant_fake_mode import ConstantFakeMode
from .explain_errors import explain_error
from .fake_tensors import fake_mode_context
from .finalize import finalize_graph
from .floats.float_inputs import FloatInputs
from .functionalize import functionalize
from .joint.trace_joint import trace_joint
from .python_state.refuse_reseeding import refuse_reseeding
from .python_state.refused_draws import refuse_python_random
from .sizes.size_inputs import SizeInputs, name_sizes
from .values.value_run import ValueRun


@dataclass(frozen=True, eq=False)
class Request:
    """A call to capture; its floats and sizes that are no constants; `grad` to capture backward as well."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    floats: FloatInputs | None
    sizes: SizeInputs | None

    def call(self) -> Call:
        """Return the call, taken apart."""
        return Call.of(self.module, self.args, self.kwargs)


def trace_call(
    request: Request, wanted: OutputSelector, values: ValueRun | None, recorder: Recorder | None,
    has_numbers: bool = False,
) -> Captured:  # fmt: skip
    """Trace a call, with the values and the calls of opaque submodules that a real run has recorded.

    With `has_numbers`, stand-ins take the place of the numbers among these values.
    """
    call, floats, sizes = request.call(), request.floats, request.sizes
    module = call.module
    if floats is not None:
        call = replace(call, leaves=floats.in_leaves(call.leaves))
    grad = request.grad and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    answers = values.answers if values is not None else None
    mode = ConstantFakeMode(floats is not None, answers, has_numbers, sizes)
    with (
        fake_mode_context(mode),
        refuse_python_random(module),
        torch.set_grad_enabled(grad),
        explain_error(module, mode),
    ):
        with refuse_reseeding(module), floats.in_attributes() if floats is not None else nullcontext():
            joint = trace_joint(call, mode, wanted, recorder)
        functional = functionalize(joint, call)
        copy_only_inputs(functional.graph.graph, mode)
        graph = finalize_graph(functional, joint)
        sum_grads_early(graph.graph)
        if sizes is not None:
            name_sizes(graph.graph)
    captured = assemble(joint, graph, wanted)
    if values is not None or recorder is not None:
        captured = with_guards(captured, values, recorder, call.tensors)
    return captured if floats is None else with_floats(captured, floats)
