"""A GradScaler with the same scale on all ranks.

    rank 0: finite     rank 1: infinite     ->   neither steps, and both halve the scale

With `torch.amp.GradScaler`, too, the step is left out on all ranks, but only ranks with infinities lower their scale.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ShardError
from ..tensors.parameter_groups import parameter_groups
from .clip_norm import AveragedGrads
from .comm.rank_group import RankGroup
from .comm.watchdog import CollectiveWatchdog
from .shards.layout import ShardLayout
from .shards.shard_views import is_placeholder


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for gradients that differ between ranks: an infinity on one rank counts on all.

    The ranks are those of the optimizer, if it is sharded, and of `group`, as that of a pipeline's stages.

    `step` and `unscale_` raise a ShardError where a compiled module's backward has averaged the gradients.
    """

    def __init__(self, *args: Any, group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ranks = None if group is None else RankGroup(CollectiveWatchdog(group))

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[Any, Tensor]:
        if any(is_placeholder(parameter.grad) for parameter in parameter_groups(optimizer)):
            raise ShardError(
                "the compiled module's backward has averaged the gradients and keeps a shard of them, which a "
                "GradScaler can't see: train without one, as with bfloat16, or compile without optimizer="
            )
        infs = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        groups = [each for each in (getattr(optimizer, "comm", None), self.ranks) if isinstance(each, RankGroup)]
        if not groups:
            return infs
        own = sum(float(value) for value in infs.values())
        largest = groups[0].tensor([own], torch.float32, found_inf.device)
        for ranks in groups:
            largest = ranks.maximum(largest)
        # Without gradients torch returns nothing, and later finds no flag of this rank.
        return {device: value.copy_(largest[0]) for device, value in (infs or {found_inf.device: found_inf}).items()}


def unscale(layout: ShardLayout, ranks: RankGroup, clipped: AveragedGrads | None, scale: Tensor) -> None:
    """Divide gradients by the scale as `GradScaler.unscale_` does; the averaged ones if they were clipped."""
    inverse = scale.double().reciprocal().float()
    if clipped is not None:
        number = float(scale)
        most, least = ranks.maximum(ranks.tensor([number, -number], torch.float64, layout.device)).tolist()
        if most != -least:
            message = f"gradients were clipped while ranks had scaled them by {most} and {-least}"
            raise ShardError(f"{message}; call scaler.unscale_(optimizer) before, or use memgraph.GradScaler")
        clipped.scale(inverse)
        return
    for parameter in layout.parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(inverse.to(parameter.grad.device))
