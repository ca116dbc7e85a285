"""Clip averaged gradients by their norm over all ranks, and keep them for the next step.

    each rank: norms of its shards   ->   norm of each parameter   ->   norm of all of them, equal on all ranks

Norms are combined parameter by parameter as in `torch.nn.utils.clip_grad_norm_`, so every order of norm is torch's: to
the bit if each parameter's gradient is whole on some rank. That of a parameter that is split is summed shard by shard
in float64, so last bits may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ShardError
from ..tensors.versions import version_of
from .comm.model_parallel import ModelParallel
from .comm.rank_group import RankGroup
from .grad_presence import SHARDED
from .shards.layout import ShardLayout
from .shards.shard_views import BucketViews

SMALL = 1e-6  # torch adds it to the norm
WIDE = (torch.float64, torch.complex128)


class AveragedGrads:
    """Averaged gradients of this rank's shards. The parameters' own gradients stay as they are on each rank."""

    def __init__(
        self, parameters: Sequence[Tensor], kinds: Sequence[int], grads: Sequence[tuple[BucketViews, list[Tensor]]]
    ) -> None:
        self.parameters, self.kinds, self.grads = list(parameters), list(kinds), list(grads)
        self.note_versions()

    def note_versions(self) -> None:
        """Note which gradients of the parameters these are the averages of."""
        self.seen = [(parameter.grad, _version(parameter.grad)) for parameter in self.parameters]

    def of_bucket(self, bucket: BucketViews) -> list[Tensor]:
        return next(grads for each, grads in self.grads if each.bucket is bucket.bucket)

    def own(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the index of each parameter with a gradient, and the gradient of a shard of it."""
        for bucket, grads in self.grads:
            for (shard, _), grad in zip(bucket.own, grads, strict=True):
                if self.kinds[shard.param]:
                    yield shard.param, grad

    def scale(self, factor: Tensor) -> None:
        for _, grad in self.own():
            grad.mul_(factor.to(grad.device))

    def is_current(self, parameters: Sequence[Tensor]) -> bool:
        """Return True if these are the averages of the parameters' gradients."""
        grads = [parameter.grad for parameter in parameters]
        if len(grads) != len(self.seen):
            return False
        pairs = list(zip(grads, self.seen, strict=True))
        if any(grad is not seen for grad, (seen, _) in pairs):
            return False
        if any(_version(grad) != version for grad, (_, version) in pairs):
            message = "gradients were changed after they had been averaged for clip_grad_norm_"
            raise ShardError(f"{message}; call it after the last backward, or zero_grad() before the next")
        return True


class ReplicatedGrads(AveragedGrads):
    """Gradients that are equal on all ranks: the parameters' own ones, which are scaled in place."""

    def scale(self, factor: Tensor) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else version_of(grad)


@dataclass(frozen=True)
class NormLimit:
    """The arguments of `clip_grad_norm_`."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool

    @classmethod
    def of(cls, max_norm: object, norm_type: object, error_if_nonfinite: object) -> NormLimit:
        given = {"max_norm": max_norm, "norm_type": norm_type}
        numbers = {name: _number(name, value) for name, value in given.items()}
        if not numbers["max_norm"] >= 0:
            raise ValueError(f"max_norm={max_norm!r}; give a norm, 0 or larger")
        if math.isnan(numbers["norm_type"]):
            raise ValueError(f"norm_type={norm_type!r}; give the order of the norm, as 2.0, or math.inf")
        return cls(**numbers, error_if_nonfinite=bool(error_if_nonfinite))

    def __str__(self) -> str:
        return f"clip_grad_norm_({self.max_norm}, {self.norm_type}, error_if_nonfinite={self.error_if_nonfinite})"


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor with several elements
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name} is a {type(value).__name__}, {str(value)[:50]!r}; give a number") from error


def clip_grad_norm(
    layout: ShardLayout, ranks: RankGroup, grads: AveragedGrads, limit: NormLimit, parallel: ModelParallel | None
) -> Tensor:
    """Scale averaged gradients down to the limit if their norm is larger; return the norm.

    Args:
        parallel: the ranks that have the other parts of the same parameters.
    """
    total = _total_norm(layout, ranks, grads, limit.norm_type, parallel)
    if limit.error_if_nonfinite and not bool(total.isfinite()):
        message = f"the total norm of order {limit.norm_type} of the gradients is {total.item()}"
        raise RuntimeError(f"{message}, so it can't be clipped; with error_if_nonfinite=False it is returned instead")
    coefficient = limit.max_norm / (total + SMALL)
    if bool(coefficient < 1):  # not so if the norm is NaN: then gradients stay as they are
        grads.scale(coefficient)
    return total


def _total_norm(
    layout: ShardLayout, ranks: RankGroup, grads: AveragedGrads, norm_type: float, parallel: ModelParallel | None
) -> Tensor:
    parameters = layout.parameters
    used = [item for item, kind in enumerate(grads.kinds) if kind and parameters[item].numel()]
    norms = _parameter_norms(layout, ranks, grads, norm_type, used)
    if parallel is not None:
        norms = [
            norms[i] if parallel.is_replicated(parameters[used[i]]) else _combine(list(rows), norm_type)
            for i, rows in enumerate(parallel.all_norms(norms).T)
        ]
    wide = [parameters[item].dtype in WIDE for item in used]
    dtype = torch.float64 if any(wide) else torch.float32
    rounded = [norm if is_wide else norm.float() for norm, is_wide in zip(norms, wide, strict=True)]
    total = torch.linalg.vector_norm(torch.stack([norm.to(dtype) for norm in rounded]), norm_type) if used else 0.0
    return torch.as_tensor(total, dtype=dtype, device=layout.device)


def _parameter_norms(
    layout: ShardLayout, ranks: RankGroup, grads: AveragedGrads, norm_type: float, used: Sequence[int]
) -> list[Tensor]:
    """Return the norm of the gradient of each of the `used` parameters, in float64; a collective."""
    parameters, shards = layout.parameters, layout.shards_by_parameter()
    norms: dict[int, list[Tensor]] = {item: [] for item in used}
    are_whole = isinstance(grads, ReplicatedGrads) and SHARDED not in grads.kinds
    if are_whole:  # the owner of the first shard sends the norm
        owned = [item for item in used if shards[item][0].rank == ranks.rank]
        norms |= {item: [_norm(grad, norm_type)] for item in owned if (grad := parameters[item].grad) is not None}
    else:
        for item, grad in grads.own():
            if grad.numel():
                norms[item].append(_norm(grad, norm_type))
    identity = math.inf if norm_type < 0 else 0.0
    own = [float(_combine(parts, norm_type)) if parts else identity for parts in norms.values()]
    rows = ranks.all_gather(ranks.tensor(own, torch.float64, layout.device))
    return [
        rows[shards[item][0].rank, i] if are_whole or len(shards[item]) == 1 else _combine(list(rows[:, i]), norm_type)
        for i, item in enumerate(used)
    ]


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    values = grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
    # The squares of low precision stay in the range of float32.
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(values, norm_type, dtype=wide).double()


def _combine(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of a vector whose parts have these norms; order 0 is a count."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(list(norms)).double()
    return stacked.sum() if norm_type == 0 else torch.linalg.vector_norm(stacked, norm_type)
