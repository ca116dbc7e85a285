"""Capture a call of a module as the graph of a whole step.

    model(x, labels=y)   ->   parameters, buffers, x, y, tangents -> forward ops, backward ops -> outputs, gradients

The call is traced on fake tensors, forward and backward at once, then made functional, then put in order. All that is
not a tensor is a constant of the graph: a caller that reuses the graph must compare it.

Trace a call until all is known that its trace needs: values of tensors, and the submodules that run as they are.

traced                               ->   forward asks for mask.any(): it runs once, and the answer is True
traced with True                     ->   layers.2 can't be traced: forward runs once more, layers.2 as it is
traced with True, layers.2 opaque    ->   captured
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..errors import CaptureError
from ..graph.captured import Captured
from ..guards.written_attributes import HeldNeeded
from ..opaque.chosen_parts import OpaqueParts
from ..system.frames import source_line
from ..tensors.loss_outputs import OutputSelector, select_all, select_losses, select_scalars
from ..tensors.traced_number import TracedFloat, TracedInt
from .call.call import Call
from .constants import share_literals
from .explain_errors import only_in_trace, refuse_if_observed
from .floats.float_inputs import FloatInputs
from .floats.type_checks import TypeChecks
from .python_state.refuse_effects import InputRequiresGradError
from .reentrant_forward import can_run_again
from .sizes.size_inputs import SizeInputs
from .trace_call import Request, trace_call
from .user_checkpoint import as_in_eager
from .values.questions import ValuesNeeded, is_condition, is_number
from .values.recurrent_layers import UnrollNeeded, whole_layers
from .values.value_run import Measure, ValueRun, run_for_values

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


@dataclass
class Tracer:
    """Traces a call, and once it has asked for values or can't trace a submodule, with what a real run recorded."""

    request: Request
    measure: Measure
    parts: OpaqueParts
    values: ValueRun | None = None
    needed: str = ""  # why numbers that forward reads from tensors can't vary
    needs_values: bool = False
    unrolls: bool = False  # recurrent layers are traced op by op, whatever the caller allows

    def sure(self, wanted: OutputSelector) -> Captured:
        """Return the captured step; for all outputs, if a wrong guess could not be made good by a second forward."""
        captured = self.captured(wanted)
        is_sure = len(captured.tangents) == len(captured.differentiable) and not captured.speculative_outputs
        if is_sure or wanted not in (select_losses, select_scalars) or can_run_again(captured):
            return captured
        return self.captured(select_all)

    def captured(self, wanted: OutputSelector) -> Captured:
        sizes = self.request.sizes
        while True:
            try:
                if self.needs_values or (self.parts.recorder is None and self.parts.reasons):
                    self._run()
                with sizes.tracing() if sizes is not None else nullcontext(), self._layers():
                    return self._traced(wanted)
            except UnrollNeeded:
                self.unrolls = True
            except HeldNeeded:
                pass  # the next trace takes their tensors as arguments
            except ValuesNeeded as error:
                if sizes is not None and self.values is not None:
                    raise  # such a call is captured with constant sizes
                if self.values is not None:
                    self.parts.add(_backward_error(error))
                self.needs_values = self.values is None
            except InputRequiresGradError:
                raise
            except CaptureError as error:
                self.parts.add(error)
            except Exception as error:
                if self._raises_in_eager(error):
                    raise
                self.parts.add(only_in_trace(error, self.request.module))

    def _layers(self) -> AbstractContextManager[None]:
        return whole_layers(False) if self.unrolls else nullcontext()

    def _traced(self, wanted: OutputSelector) -> Captured:
        """Trace with stand-ins for the numbers that forward reads; with the numbers themselves if that fails."""
        traced = partial(trace_call, self.request, wanted, self.values, self.parts.recorder)
        if self.needed or self.values is None or not any(map(is_number, self.values.answers)):
            return traced()
        checks = TypeChecks((TracedFloat, TracedInt))
        try:
            with checks.watching():
                captured = traced(has_numbers=True)
            if not checks.found:
                return captured
            needed = f"the type or identity of one may be checked at {checks.found}"
        except (UnrollNeeded, HeldNeeded):
            raise
        except Exception as error:  # the trace with numbers will say what is wrong with the call
            needed = f"{error.__cause__ or error}"
        captured, self.needed = traced(), needed
        LOG.info("numbers that forward reads from tensors are guarded by their values: %s", needed)
        return captured

    def _raises_in_eager(self, error: Exception) -> bool:
        """Return True if an error is memgraph's, or if the plain forward raises as well, or if that can't be known."""
        request = self.request
        is_ours = type(error).__module__.partition(".")[0] == "memgraph"
        if is_ours or request.floats is not None or request.sizes is not None:
            return True
        try:
            self._run()
        except Exception:
            return True
        return False

    def _run(self) -> None:
        self.needs_values = False
        with torch.set_grad_enabled(self.request.grad and torch.is_grad_enabled()):
            call = self.request.call()
            if any(isinstance(tensor, FakeTensor) for tensor in call.tensors):
                raise CaptureError("forward branches on values of tensors, and shapes alone have none: give a batch")
            try:
                self.values = run_for_values(call, self.measure, self.parts.recording)
            except Exception as error:
                if self.parts.reasons:
                    refuse_if_observed(error, self.request.module)
                raise
        if self.request.sizes is not None and not all(map(is_condition, self.values.answers)):
            raise ValuesNeeded  # a number may be a length


def _backward_error(error: ValuesNeeded) -> CaptureError:
    explained = CaptureError(
        f"the step can't be captured at {source_line(error.__traceback__)}: in backward, a shape or a number depends "
        "on a tensor's values\ncompute with torch.where or a mask, or do this outside of the module"
    )
    explained.__cause__ = error
    return explained
