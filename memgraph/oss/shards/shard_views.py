"""Views of the parameters of one bucket, for each rank and each shard.

    w f32[7] in bucket 0, rank 1 of 2   ->   w[4:7], a flat view of w: an update of the view updates w

Elements are ordered as in memory, so a shard of a channels_last weight is contiguous too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.shards import Bucket, ShardRange

from ...tensors.layout import flat, is_dense

PLACEHOLDER = "memgraph_placeholder"


@dataclass(frozen=True)
class BucketViews:
    """A bucket with views of its parameters. Rank r owns the consecutive elements `stretches[r]`, viewed by `views[r]`;
    `own` are the shards of this rank, as its optimizer sees them."""

    number: int
    bucket: Bucket
    stretches: tuple[tuple[ShardRange, ...], ...]
    views: tuple[tuple[Tensor, ...], ...]
    own: tuple[tuple[ShardRange, Tensor], ...]

    @classmethod
    def of(cls, number: int, bucket: Bucket, parameters: Sequence[Tensor], rank: int, ranks: int) -> BucketViews:
        stretches = tuple(bucket.ranges(each) for each in range(ranks))
        views = tuple(tuple(_view(parameters[one.param], one) for one in of_rank) for of_rank in stretches)
        own = tuple((one, _shard(parameters[one.param], one)) for one in bucket.owned_by(rank))
        return cls(number, bucket, stretches, views, own)

    def shard_grads(self, stretches: Sequence[Tensor]) -> list[Tensor]:
        """Split gradients of this rank's stretches into gradients of its shards, each in the shard's shape."""
        grads = []
        rest = list(stretches)
        for shard, view in self.own:
            grads.append(reshape_like(rest[0][: shard.count], view))
            rest[0] = rest[0][shard.count :]
            if not rest[0].numel():
                del rest[0]
        return grads

    def assign_grads(self, grads: Sequence[Tensor], kinds: Sequence[int]) -> list[Tensor]:
        """Set `.grad` of this rank's shards where `kinds` says that there is a gradient; return those shards."""
        views = []
        for (shard, view), grad in zip(self.own, grads, strict=True):
            if kinds[shard.param]:
                view.grad = grad
                views.append(view)
        return views


def _view(parameter: Tensor, shard: ShardRange) -> Tensor:
    parameter = parameter.detach()
    return flat(parameter)[shard.begin : shard.end] if is_dense(parameter) else parameter


def _shard(parameter: Tensor, shard: ShardRange) -> Tensor:
    """A shard that is a whole parameter keeps its shape, which some optimizers read."""
    return parameter.detach() if shard.count == parameter.numel() else _view(parameter, shard)


def reshape_like(elements: Tensor, view: Tensor) -> Tensor:
    if is_dense(view):
        return elements.as_strided(view.shape, view.stride(), elements.storage_offset())
    return elements.view(view.shape)


def in_order_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Flatten a tensor of the parameter's shape in the memory order of the parameter."""
    if tensor.stride() == parameter.stride() and is_dense(tensor):
        return flat(tensor)
    if not is_dense(parameter):
        return tensor.detach().reshape(-1)
    return flat(torch.empty_like(parameter).copy_(tensor.detach()))


def placeholder_grad(parameter: Tensor) -> Tensor:
    """Return a gradient that reads as NaN and takes one element, for a parameter whose gradient is sharded.

    Torch refuses to clip it, to scale it or to add to it.
    """
    placeholder = parameter.detach().new_full((), torch.nan).expand(parameter.shape)
    setattr(placeholder, PLACEHOLDER, placeholder._version)
    return placeholder


def is_placeholder(grad: Tensor | None) -> bool:
    return grad is not None and hasattr(grad, PLACEHOLDER)


def is_written(placeholder: Tensor) -> bool:
    """Return True if a placeholder was written to, usually by `zero_grad(set_to_none=False)`."""
    return bool(placeholder._version != getattr(placeholder, PLACEHOLDER))
