"""A module's call -> the graph of its step.

model(x)                        ->   forward, backward
gradients exist                 ->   backward adds to them
fuse_update, sharded optimizer  ->   updates and collectives between the ops
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from ..capture.capture import capture
from ..capture.explain_errors import device_mismatch, is_device_mismatch, refuse_hooks
from ..capture.values.recurrent_layers import whole_layers
from ..graph.accumulate_grads import mark_hooked_grads
from ..graph.captured import Captured
from ..graph.gradient_sums import with_sums_in_place
from ..guards.signature import parameters_read_after_backward
from ..microbatch.check_independence import require_row_independence
from ..options.compile_options import CompileOptions
from ..profile.measuring_room import room_nbytes
from ..profile.memory_meter import argument_nbytes, measure_peak
from ..slices.step_blocks import BlockRequest, BlockTrials, in_blocks
from ..slices.step_cuts import WHOLE, Cuts
from ..slices.step_slices import Extent, SliceRequest, in_slices
from ..system.locks import capturing
from ..system.trial_room import ops_within
from .lengths.step_at_length import step_at_length
from .optimizer_state import OptimizerState
from .step_graph import Call, StepGraph, graphs_of
from .target import Target


def capture_step(
    call: Call, target: Callable[[], Target], state: OptimizerState, options: CompileOptions, known: Captured | None,
    shares: bool = True, cuts: Cuts = WHOLE,
) -> StepGraph:  # fmt: skip
    """Capture a call and insert what its optimizer asks for; `known` is a capture of the same call.

    If it `shares`, it may be made of a step with symbols for lengths. slices="auto" goes as far as `cuts` say.

    Raises:
        CaptureError: the call can't be captured.
    """
    module = call.module
    with state.announcing_failure():
        where = target()
        refuse_hooks(module)
        state.before_capture()
        room = capture_room(call, where, state)
        request, blocks = _slices(where, options, cuts.extent), _blocks(where, options, cuts, state, room)
        shares = shares and not request.is_made and not blocks.is_made and not where.lowers
        if known is None and shares:
            numbered = partial(capture_step, call, target, state, options, known, shares=False)
            if made := step_at_length(call, where, state, options, numbered):
                with capturing(module):
                    _require_row_independence(call, where.device, room)
                return made
        unrolls = cuts.unrolls or state.has_other_ranks  # ranks that plan together make one attempt
        call = replace(call, outputs=state.outputs(call.outputs))
        captured = known or captured_call(call, where.device, room, unrolls)
        if known is None:
            gc.collect()  # the traces that were made on the way are cycles, and hold constants of the module
        captured = in_slices(captured, request, partial(state.with_update, captured=captured))
        captured = in_blocks(captured, blocks)
        captured, trained = state.insert_ops(captured, state.trained(captured))
    ranks = state.ranks(trained, where.device)
    ranks.check_new_step()
    lowers = where.lowers and not state.has_other_ranks  # ranks would each find other segments worth it

    def step(graph: fx.Graph, later: StepGraph | None = None) -> StepGraph:
        graph = graph if lowers else with_sums_in_place(graph)  # Inductor may fuse sums with the ops around them
        return StepGraph(where, captured, graph, trained, ranks, lowers, later)

    first, later = graphs_of(captured, module, options, trained)
    return step(first, None if later is None else step(later))


def capture_room(call: Call, target: Target, state: OptimizerState) -> int:
    """Return the bytes that the budget leaves for what has to be run before a capture."""
    batch_nbytes = argument_nbytes(call.args, call.kwargs)
    return room_nbytes(target.budget, target.device, state.resident_nbytes(), batch_nbytes)


def _slices(target: Target, options: CompileOptions, extent: Extent) -> SliceRequest:
    """Return the slices that the options, or a saved plan, ask for."""
    saved = tuple(plan.slices for plan in options.plans if plan.slices)
    return SliceRequest(None if options.plans else options.slices, saved, target.budget, target.device, extent)


def _blocks(target: Target, options: CompileOptions, cuts: Cuts, state: OptimizerState, room: int) -> BlockRequest:
    """Return the blocks of weights that are asked for: only what is streamed comes in blocks."""
    if not target.tiers or options.cuda_graphs is True or state.whole_reason is not None:
        return BlockRequest()
    if options.plans:
        return BlockRequest(saved=tuple(plan.row_sizes for plan in options.plans))
    if not cuts.level:
        return BlockRequest()
    held, trials = state.held_parameters(), BlockTrials(room)
    return BlockRequest(cuts.level, options.slices == "auto", cuts.tries, has_equal_bits=trials, held=held)


def _require_row_independence(call: Call, device: torch.device, room: int) -> None:
    require_row_independence(call.module, call.args, call.kwargs, device, room)


def captured_call(call: Call, device: torch.device, room: int, unrolls: bool = True) -> Captured:
    """Capture a call; the budget leaves `room` bytes for what has to be run before.

    A recurrent layer `unrolls` into the ops of its steps, or is one op.

    Raises:
        CaptureError: it can't be captured, or its tensors are on several devices.
    """
    module, args, kwargs = call.module, call.args, call.kwargs
    try:
        with capturing(module), ops_within(room), whole_layers(not unrolls):
            _require_row_independence(call, device, room)
            measure = partial(_peak_nbytes, device=device)
            captured = _general(call, measure) or capture(
                module, args, kwargs, grad=torch.is_grad_enabled(), wanted=call.outputs, measure=measure,
                opaque=call.opaque, preferred=call.preferred,
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


def _general(call: Call, measure: Callable[[Callable[[], object]], int]) -> Captured | None:
    if call.general is None:
        return None
    return call.general(call.module, call.args, call.kwargs, torch.is_grad_enabled(), call.outputs, measure)
