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

from .accumulation import mark_watched
from .alone import capturing
from .capture import Captured, Wanted, capture
from .device import unused_nbytes
from .float_capture import FloatTrial
from .fused import FusedUpdate
from .fusing import updating
from .oss import OSS
from .oss.exchanged import exchanging
from .oss.gathering import arrivals, gathering
from .refusal import elsewhere, is_elsewhere
from .rows import refuse_mixing
from .signature import read_later
from .trained import Trained


def captured_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Wanted, device: torch.device,
    floats: FloatTrial | None = None,
) -> Captured:  # fmt: skip
    """Capture a call; `floats` of it are inputs, if they can be.

    Raises:
        CaptureError: it can't be captured, or its tensors are on several devices.
    """
    try:
        with capturing(module):
            refuse_mixing(module, args, kwargs, unused_nbytes(device) // 2)
            call, grad = (module, args, kwargs), torch.is_grad_enabled()
            opened = floats.capture(*call, grad, wanted) if floats is not None else None
            captured = opened or capture(*call, grad=grad, wanted=wanted)
    except RuntimeError as error:
        if not is_elsewhere(error):
            raise
        raise elsewhere(error, args, kwargs, device) from error
    mark_watched(captured, read_later(module))
    return captured


def with_updates(
    captured: Captured, trained: Trained, module: nn.Module, fused: FusedUpdate | None
) -> tuple[Captured, Trained]:
    """Insert the updates of parameters into backward, if there is a `fused` update."""
    if fused is None or not captured.differentiable:
        return captured, trained
    captured, updates = updating(captured, module, fused.optimizer)
    return captured, replace(trained, updates=updates)


def with_collectives(
    captured: Captured, trained: Trained, module: nn.Module, sharded: OSS | None
) -> tuple[Captured, Trained]:
    """Reduce gradients over the ranks of a `sharded` optimizer in backward, and gather parameters in forward."""
    if sharded is None:
        return captured, trained
    named = dict(module.named_parameters())
    captured = exchanging(captured, sharded.inside.parcels(named))
    if trained.parameters:
        captured = gathering(captured, arrivals(sharded, named))
    buckets = frozenset(role.index for role in captured.outputs if role.kind == "shard")
    return captured, replace(trained, shards=buckets, gathers=captured.gathers)
