"""Capture the step of a model without bytes.

ModelCall(model, args)   ->   StepGraph, with the ops that a CPU runs
"""

from __future__ import annotations

import torch

from ..api.shapes_only import fake_arguments
from ..errors import CaptureError
from ..graph.captured import Captured
from ..options.compile_options import parse_options
from ..planning.capture_step import capture_step
from ..planning.optimizers import optimizer_state
from ..planning.step_graph import Call, StepGraph
from ..planning.target import Target
from ..slices.step_cuts import Cuts
from ..system.device import CPU
from .described_model import ModelCall


def captured_graph(
    call: ModelCall, budget: int, device: torch.device = CPU, known: Captured | None = None, level: int = 0
) -> StepGraph:
    """Return the graph of a call's step, in which meta tensors stand for ones on the device.

    On another device than the CPU, parameters and buffers have to be there already.

    Args:
        known: a capture of the same call.
        level: how many weights come in blocks of rows, and how small these are.

    Raises:
        CaptureError: the model can't be captured.
    """
    options = parse_options(budget, optimizer=call.optimizer, accumulate=False, opaque=False, lower=None)
    module = call.module
    state = optimizer_state(module, options, device)
    tier = "disk" if level else None  # of any name: nothing is offloaded here
    target = Target(device, budget, tier, None, None, lowers=False)
    args, kwargs = fake_arguments(call.args, dict(call.kwargs), device)
    step = Call(module, args, kwargs, options.outputs)
    try:
        return capture_step(step, lambda: target, state, options, known, cuts=Cuts(level=level, tries=False))
    except NotImplementedError as error:
        raise CaptureError(
            f"forward asks for the values of tensors, and here they have none ({error}): leave out the argument that "
            "it asks about, such as a mask, or plan with real tensors, as `memgraph plan` does"
        ) from error
