"""The graph of a call's step, with what is asked of it besides gradients.

captured_call(module, args, kwargs, ...)   ->   forward, backward
with_updates(...)                          ->   forward, backward that updates parameters
with_collectives(...)                      ->   forward that gathers parameters, backward that reduces gradients
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..capture.capture import OutputSelector, capture
from ..capture.explain_errors import elsewhere, is_elsewhere
from ..graph.accumulate_grads import mark_hooked_grads
from ..graph.captured import Captured
from ..graph.fuse_updates import add_updates
from ..guards.signature import is_read_after_backward
from ..microbatch.check_independence import require_row_independence
from ..optim.fused_update import FusedUpdate
from ..optim.state_parts import TrainedParameters
from ..oss import OSS
from ..oss.compiled.insert_all_gather import arrivals, insert_all_gathers
from ..oss.compiled.insert_reduce_scatter import insert_reduce_scatters
from ..system.device import unused_nbytes
from ..system.locks import capturing


def captured_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: OutputSelector, device: torch.device
) -> Captured:
    """Capture a call.

    Raises:
        CaptureError: it can't be captured, or its tensors are on several devices.
    """
    try:
        with capturing(module):
            require_row_independence(module, args, kwargs, unused_nbytes(device) // 2)
            captured = capture(module, args, kwargs, grad=torch.is_grad_enabled(), wanted=wanted)
    except RuntimeError as error:
        if not is_elsewhere(error):
            raise
        raise elsewhere(error, args, kwargs, device) from error
    mark_hooked_grads(captured, is_read_after_backward(module))
    return captured


def with_updates(
    captured: Captured, trained: TrainedParameters, module: nn.Module, fused: FusedUpdate | None
) -> tuple[Captured, TrainedParameters]:
    """Insert the updates of parameters into backward, if there is a `fused` update."""
    if fused is None or not captured.differentiable:
        return captured, trained
    captured, updates = add_updates(captured, module, fused.optimizer)
    return captured, replace(trained, updates=updates)


def with_collectives(
    captured: Captured, trained: TrainedParameters, module: nn.Module, sharded: OSS | None
) -> tuple[Captured, TrainedParameters]:
    """Reduce gradients over the ranks of a `sharded` optimizer in backward, and gather parameters in forward."""
    if sharded is None:
        return captured, trained
    named = dict(module.named_parameters())
    captured = insert_reduce_scatters(captured, sharded.inside.parcels(named))
    if trained.parameters:
        captured = insert_all_gathers(captured, arrivals(sharded, named))
    buckets = frozenset(role.index for role in captured.outputs if role.kind == "shard")
    return captured, replace(trained, shards=buckets, gathers=captured.gathers)
