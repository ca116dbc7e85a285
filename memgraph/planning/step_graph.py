"""A module's call -> the graph of its step, with updates and collectives, that is priced and planned.

model(x)                        ->   forward, backward
gradients exist                 ->   backward adds to them
fuse_update, sharded optimizer  ->   updates and collectives between the ops
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from passes import Machine, Trace, predict

from ..capture.capture import capture
from ..capture.explain_errors import device_mismatch, is_device_mismatch, refuse_hooks
from ..capture.floats.float_capture import FloatCapture
from ..capture.sizes.size_capture import SizeCapture
from ..graph.accumulate_grads import accumulate_grads, mark_hooked_grads
from ..graph.captured import Captured
from ..graph.gradient_sums import with_sums_in_place
from ..graph.summarize import summarize
from ..guards.signature import has_gradients, parameters_read_after_backward, parameters_with_grad_hooks
from ..microbatch.check_independence import require_row_independence
from ..optim.state_parts import TrainedParameters
from ..options.compile_options import CompileOptions
from ..profile.memory_meter import measure_peak
from ..slices.step_slices import chosen_slices, given_slices
from ..system.device import unused_nbytes
from ..system.locks import capturing
from ..tensors.loss_outputs import OutputSelector
from .capture_cache import KnownLength
from .optimizer_state import OptimizerState
from .ranks import Ranks
from .target import Target

CallCapture = FloatCapture | SizeCapture | KnownLength


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module.

    Attributes:
        outputs: selects the outputs that backward starts from.
        general: captures it with floats as inputs or with symbols for lengths, if they can be, or knows its capture.
        opaque: submodules that run as they are, as in `CompileOptions`.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: OutputSelector
    general: CallCapture | None = None
    opaque: bool | Sequence[str] = False

    @property
    def nearby(self) -> Trace | None:
        """The priced trace of the same ops with another length, if there is one."""
        return self.general.nearby if isinstance(self.general, KnownLength) else None


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The graph of a call's step.

    Attributes:
        graph: forward, backward, and what was inserted; the captured graph, or one that adds to gradients.
        lowers: ops are compiled with Inductor.
        later: of the same call when gradients exist, if that is another graph and such a call may come.
    """

    target: Target
    captured: Captured
    graph: fx.Graph
    trained: TrainedParameters
    ranks: Ranks
    lowers: bool
    later: StepGraph | None = None


def capture_step(
    call: Call, target: Callable[[], Target], state: OptimizerState, options: CompileOptions, known: Captured | None
) -> StepGraph:
    """Capture a call and insert what its optimizer asks for; `known` is a capture of the same call.

    Raises:
        CaptureError: the call can't be captured.
    """
    module = call.module
    with state.announcing_failure():
        where = target()
        refuse_hooks(module)
        state.before_capture()
        captured = known or captured_call(replace(call, outputs=state.outputs(call.outputs)), where.device)
        captured = _in_slices(captured, where, state, options)
        captured, trained = state.insert_ops(captured, state.trained(captured))
    ranks = state.ranks(trained, where.device)
    ranks.check_new_step()
    lowers = where.lowers and not state.has_other_ranks  # ranks would each find other segments worth it

    def step(graph: fx.Graph, later: StepGraph | None = None) -> StepGraph:
        graph = graph if lowers else with_sums_in_place(graph)  # Inductor may fuse sums with the ops around them
        return StepGraph(where, captured, graph, trained, ranks, lowers, later)

    if options.accumulate or has_gradients(module.parameters()):
        return step(_accumulating(captured, module, options))
    is_only = options.accumulate is False or not trained.parameters or trained.updates
    return step(captured.graph.graph, None if is_only else step(_accumulating(captured, module, options)))


def _in_slices(captured: Captured, target: Target, state: OptimizerState, options: CompileOptions) -> Captured:
    """Return the step in the slices that are asked for; "auto" leaves one that fits as it is."""
    asked, device = options.slices, target.device
    for plan in options.plans:
        if plan.slices and (found := given_slices(captured, plan.slices, device)) is not None:
            return found
    if asked is None or options.plans:
        return captured
    trace = summarize(captured.graph.graph)
    machine = Machine(target.budget, str(device))
    states = predict(state.add_update(trace, captured.graph.graph, state.trained(captured)), machine).peak
    if asked == "auto" and states <= target.budget:
        return captured
    return chosen_slices(captured, asked, target.budget - states + predict(trace, machine).peak, device)


def _accumulating(captured: Captured, module: nn.Module, options: CompileOptions) -> fx.Graph:
    """Return the graph that adds to gradients, except those that autograd adds: of several open forwards, all."""
    by_autograd = parameters_with_grad_hooks(module) if options.forwards == 1 else dict(module.named_parameters())
    return accumulate_grads(captured, by_autograd)


def captured_call(call: Call, device: torch.device) -> Captured:
    """Capture a call.

    Raises:
        CaptureError: it can't be captured, or its tensors are on several devices.
    """
    module, args, kwargs = call.module, call.args, call.kwargs
    try:
        with capturing(module):
            require_row_independence(module, args, kwargs, unused_nbytes(device) // 2)
            captured = _general(call) or capture(
                module, args, kwargs, grad=torch.is_grad_enabled(), wanted=call.outputs,
                measure=partial(_peak_nbytes, device=device), opaque=call.opaque,
            )  # fmt: skip
    except RuntimeError as error:
        if not is_device_mismatch(error):
            raise
        raise device_mismatch(error, args, kwargs, device) from error
    mark_hooked_grads(captured, parameters_read_after_backward(module))
    return captured


def _peak_nbytes(run: Callable[[], object], device: torch.device) -> int:
    """Call a function, and return the peak bytes that it allocated; 0 if the caller runs a profiler."""
    _, allocated = measure_peak(run, device)
    return allocated.peak if allocated is not None else 0


def _general(call: Call) -> Captured | None:
    if call.general is None:
        return None
    return call.general(call.module, call.args, call.kwargs, torch.is_grad_enabled(), call.outputs)
