"""A GradScaler whose ranks have the same scale, and what a step does with one.

    rank 0: finite     rank 1: infinite     ->   neither steps, and both halve the scale

Where each rank has gradients of its own, a scaler looks at these, and they may be infinite on one rank alone. The step
itself is left out on all ranks with any scaler; with `torch.amp.GradScaler` only those that found it lower their scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ShardError
from .shards.placeholder_grads import is_placeholder

if TYPE_CHECKING:
    from .optimizer import OSS


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, for gradients that differ between ranks: what one has found, all have.

    `step` and `unscale_` raise a ShardError where a compiled module's backward has averaged the gradients.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[Any, Tensor]:
        _refuse_ghosts(optimizer)
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not hasattr(optimizer, "exchange"):
            return found
        worst = sum(float(value) for value in found.values())
        exchange = optimizer.comm
        everywhere = exchange.most(exchange.numbers([worst], torch.float32, found_inf.device))[0]
        # Where there are no gradients, torch finds nothing, and has nothing to look at later.
        return {device: value.copy_(everywhere) for device, value in (found or {found_inf.device: found_inf}).items()}


def _refuse_ghosts(optimizer: Any) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None and is_placeholder(parameter.grad):
            raise ShardError(
                "the compiled module's backward has averaged the gradients and keeps its rank's part, of which a "
                "GradScaler sees nothing: train without one, as with bfloat16, or compile without optimizer="
            )


def unscale(optimizer: OSS, scale: Tensor) -> None:
    """Undo the scale of the gradients as `GradScaler.unscale_` does; of the averaged ones, if these are held.

    Raises:
        ShardError: what is held was averaged of gradients of different scales.
    """
    inverse = scale.double().reciprocal().float()
    if optimizer.held is not None:
        number = float(scale)
        device = optimizer.layout.device
        most = optimizer.comm.most(optimizer.comm.numbers([number, -number], torch.float64, device))
        if float(most[0]) != -float(most[1]):
            message = f"gradients were clipped while ranks had scaled them by {float(most[0])} and {-float(most[1])}"
            raise ShardError(f"{message}; call scaler.unscale_(optimizer) before, or use memgraph.GradScaler")
        optimizer.held.scale(inverse)
        return
    for parameter in optimizer.layout.parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(inverse.to(parameter.grad.device))
