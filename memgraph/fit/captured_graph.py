"""Capture the step of a model without bytes.

ModelCall(model, args)   ->   StepGraph, with the ops that a CPU runs
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..api.shapes_only import fake_arguments
from ..errors import CaptureError
from ..graph.captured import Captured
from ..options.compile_options import parse_options
from ..planning.capture_step import capture_step
from ..planning.optimizers import optimizer_state
from ..planning.step_graph import Call, StepGraph
from ..planning.target import Target
from ..slices.step_cuts import Cuts
from ..storage.places import Places
from ..system.device import CPU
from .described_model import ModelCall

DROPOUT = 4  # the position of dropout_p
MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def captured_graph(
    call: ModelCall, budget: int, device: torch.device = CPU, known: Captured | None = None, level: int = 0,
    fused: bool = False, accumulate: bool = False,
) -> StepGraph:  # fmt: skip
    """Return the graph of a call's step, in which meta tensors stand for ones on the device.

    On another device than the CPU, parameters and buffers have to be there already.

    Args:
        known: a capture of the same call.
        level: how many weights come in blocks of rows, and how small these are.
        accumulate: the step adds to gradients that exist.
        fused: the step is for a GPU, where attention with dropout is one op as well.

    Raises:
        CaptureError: the model can't be captured.
    """
    options = parse_options(budget, optimizer=call.optimizer, accumulate=accumulate, opaque=False, lower=None)
    module = call.module
    state = optimizer_state(module, options, device)
    tiers = ("disk",) if level else ()  # of any name: nothing is offloaded here
    target = Target(device, budget, tiers, Places({}), None, lowers=False)
    args, kwargs = fake_arguments(call.args, dict(call.kwargs), device)
    step = Call(module, args, kwargs, options.outputs)
    try:
        with FusedAttention() if fused else nullcontext():
            return capture_step(step, lambda: target, state, options, known, cuts=Cuts(level=level, tries=False))
    except NotImplementedError as error:
        raise CaptureError(
            f"forward asks for the values of tensors, and here they have none ({error}): leave out the argument that "
            "it asks about, such as a mask, or plan with real tensors, as `memgraph plan` does"
        ) from error


class FusedAttention(TorchFunctionMode):
    """Leaves out the dropout of attention, which a GPU's fused ops draw by a seed, and a CPU by a mask of all pairs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and len(args) > DROPOUT:
            args = (*args[:DROPOUT], 0.0, *args[DROPOUT + 1 :])
        elif func is F.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
        elif func is F.multi_head_attention_forward:
            given = MULTI_HEAD.bind(*args, **kwargs)
            if not given.arguments.get("need_weights", True):  # else their dropout has a mask on a GPU as well
                given.arguments["dropout_p"] = 0.0
                args, kwargs = given.args, given.kwargs
        return func(*args, **kwargs)
