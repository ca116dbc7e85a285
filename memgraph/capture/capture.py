"""Capture a call of a module as the graph of a whole step.

    model(x, labels=y)   ->   parameters, buffers, x, y, tangents -> forward ops, backward ops -> outputs, gradients

The call is traced on fake tensors, forward and backward at once, then made functional, then put in order. All that is
not a tensor is a constant of the graph: a caller that reuses the graph must compare it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..graph.captured import Captured
from ..opaque.chosen_parts import OpaqueParts
from ..tensors.loss_outputs import OutputSelector, select_all
from .call.call import Call
from .constants import share_literals
from .floats.float_inputs import FloatInputs
from .sizes.size_inputs import SizeInputs
from .trace_call import Request
from .tracer import Tracer
from .user_checkpoint import as_in_eager
from .values.value_run import Measure


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
    preferred: Sequence[str] = (),
) -> Captured:
    """Capture the step of `module(*args, **kwargs)`; nothing is changed.

    No real tensor is read, unless Python asks for the value of one. Then forward runs once, inside `measure`, and the
    graph has guards.

    `opaque` submodules run as they are: those at these paths, and unless it is False, those that can't be traced. So
    do those at the paths `preferred`, where that is possible.

    With `grad`, backward starts from those differentiable outputs that `wanted` selects. It starts from all of them if
    the selection is a guess and forward could not be run again for the others. `floats` of the call become inputs of
    the graph instead of constants, and `sizes` symbols.

    Raises:
        CaptureError: the call can't be captured.
        ValueNeededError: forward or backward needs the value of one of the `floats`.
        SizeNeededError: it needs the value of one of the `sizes`.
        ValuesNeeded: with `sizes`, Python asks for the value of a tensor.
    """
    request = Request(module, args, kwargs, grad, floats, sizes)
    tracer = Tracer(request, measure, OpaqueParts(module, opaque, as_in_eager, preferred))
    try:
        captured = tracer.sure(wanted)
        share_literals(captured.graph)
        return captured
    finally:
        tracer.parts.close()
        gc.collect(1)  # a trace is garbage with cycles, and holds small constants of the model's


def operands(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the real tensors for the placeholders of a captured call, without the tangents."""
    return Call.of(module, args, kwargs).tensors
