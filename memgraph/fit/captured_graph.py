"""Capture the step of a model without bytes.

ModelCall(model, args)   ->   StepGraph, with the ops that a CPU runs
"""

from __future__ import annotations

import torch

from ..api.shapes_only import fake_arguments
from ..errors import CaptureError
from ..options.compile_options import parse_options
from ..planning.capture_step import capture_step
from ..planning.optimizers import optimizer_state
from ..planning.step_graph import Call, StepGraph
from ..planning.target import Target
from ..system.device import CPU
from .described_model import ModelCall


def captured_graph(call: ModelCall, budget: int, device: torch.device = CPU) -> StepGraph:
    """Return the graph of a call's step, in which meta tensors stand for ones on the device.

    On another device than the CPU, parameters and buffers have to be there already.

    Raises:
        CaptureError: the model can't be captured.
    """
    options = parse_options(budget, optimizer=call.optimizer, accumulate=False, opaque=False, lower=None)
    state = optimizer_state(call.model, options, device)
    target = Target(device, budget, None, None, None, lowers=False)
    args, kwargs = fake_arguments(call.args, dict(call.kwargs), device)
    step = Call(call.model, args, kwargs, options.outputs)
    try:
        return capture_step(step, lambda: target, state, options, None)
    except NotImplementedError as error:
        raise CaptureError(
            f"forward asks for the values of tensors, and here they have none ({error}): leave out the argument that "
            "it asks about, such as a mask, or plan with real tensors, as `memgraph plan` does"
        ) from error
