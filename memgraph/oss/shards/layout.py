"""Map the elements of an optimizer's parameters to the ranks that own them.

    layout.add_group(group)    buckets for the parameters of a group, behind those of earlier groups
    layout.refresh()           new views where the caller has assigned `p.data`

The same layout object serves all parts of an optimizer as long as it exists.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.shards import Bucket, BucketSizes, ParamSpec, ShardRange, make_buckets, owned_nbytes

from ...errors import ShardError
from ...optim.elementwise import EXACT_DTYPES
from ...tensors.layout import is_dense
from .shard_views import BucketViews, in_order_of, is_placeholder, reshape_like

ALONE = 1 << 20  # bytes of a stretch that is a bucket of its own
CACHED = 1 << 20  # most bytes of a shard on a CPU: an update reads it several times, so it should stay in the cache
VECTOR = 64  # elements: no kernel processes more at once

Mark = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


class ShardLayout:
    """Buckets of parameters and their shards. `owners` is the number of ranks that own elements."""

    def __init__(self, rank: int, ranks: int, bucket_bytes: int, splits: bool, owners: int) -> None:
        self.rank, self.ranks, self.owners = rank, ranks, owners
        self.bucket_bytes, self.splits = bucket_bytes, splits
        self.reset()

    def reset(self) -> None:
        self.parameters: list[Tensor] = []
        self.buckets: list[BucketViews] = []
        self.specs: list[ParamSpec] = []
        self.group_of: list[int] = []  # index of the group of each parameter
        self.checksum = 0  # equal on ranks with equal layouts
        self._marks: list[Mark] = []

    def add_group(self, index: int, group: Mapping[str, Any]) -> None:
        parameters, fused = list(group["params"]), bool(group.get("fused"))
        _refuse_overlap([*self.parameters, *parameters])
        kinds: dict[object, int] = {}
        specs = []
        for p in parameters:
            kind = kinds.setdefault((p.dtype, p.device, p.requires_grad), len(kinds))
            specs.append(self._spec_of(p, kind, fused))
        # Fused kernels read everything once, and round the remainder of a vector differently.
        cached = CACHED if all(p.device.type == "cpu" for p in parameters) and not fused else None
        loads = owned_nbytes([views.bucket for views in self.buckets], self.specs, self.owners)
        sizes = BucketSizes(self.bucket_bytes, ALONE, cached)
        buckets = [bucket.shifted(len(self.specs)) for bucket in make_buckets(specs, self.owners, sizes, loads)]
        self.parameters += parameters
        self.buckets += [self._views(len(self.buckets) + i, bucket) for i, bucket in enumerate(buckets)]
        self.specs += specs
        self.group_of += [index] * len(specs)
        self._marks += map(_mark, parameters)
        words = [str(views.bucket) for views in self.buckets] + [str(mark[1:4]) for mark in self._marks]
        self.checksum = zlib.crc32("\n".join(words).encode()) >> 1

    def _spec_of(self, p: Tensor, kind: int, fused: bool) -> ParamSpec:
        whole = not self.splits or not is_dense(p) or p.is_complex()
        quantum = 1 if p.dtype in EXACT_DTYPES and not fused else VECTOR
        return ParamSpec(p.numel(), p.element_size(), kind, whole, not p.requires_grad, quantum)

    def _views(self, number: int, bucket: Bucket) -> BucketViews:
        return BucketViews.of(number, bucket, self.parameters, self.rank, self.ranks)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    @property
    def is_dense_on_cpu(self) -> bool:
        return all(p.device.type == "cpu" and is_dense(p) for p in self.parameters)

    def own_shards(self) -> list[tuple[ShardRange, Tensor]]:
        return [shard for bucket in self.buckets for shard in bucket.own]

    def group_views(self, index: int) -> list[Tensor]:
        """Views of this rank's shards in a group, in the order of the caller's parameters: LBFGS sums over all."""
        own = [one for one in self.own_shards() if self.group_of[one[0].param] == index]
        return [view for _, view in sorted(own, key=lambda one: (one[0].param, one[0].begin))]

    def shards_by_parameter(self) -> list[list[ShardRange]]:
        each: list[list[ShardRange]] = [[] for _ in self.parameters]
        for bucket in self.buckets:
            for shard in bucket.bucket.shards:
                each[shard.param].append(shard)
        return [sorted(of_one, key=lambda shard: shard.begin) for of_one in each]

    def is_trained(self, bucket: BucketViews) -> bool:
        return any(self.parameters[item].requires_grad for item in bucket.bucket.params)

    def has_other_specs(self) -> bool:
        """Return True if the shape, strides, dtype or device of a parameter has changed."""
        return [_mark(p)[1:] for p in self.parameters] != [mark[1:] for mark in self._marks]

    def refresh(self) -> list[tuple[Tensor, Tensor]]:
        """Renew the views if the memory of a parameter has changed; return pairs of old and new views of own shards."""
        marks = list(map(_mark, self.parameters))
        if marks == self._marks:
            return []
        for i, (new, old) in enumerate(zip(marks, self._marks, strict=True)):
            if new[1:] != old[1:]:
                raise ShardError(f"parameter {i} was {_spec(old)} and is {_spec(new)} now; create a new optimizer")
        _refuse_overlap(self.parameters)
        before, self._marks = self.own_shards(), marks
        self.buckets = [self._views(views.number, views.bucket) for views in self.buckets]
        return [(old, new) for (_, old), (_, new) in zip(before, self.own_shards(), strict=True)]

    def flatten_grads(self) -> dict[int, Tensor]:
        """Return the gradients of all parameters that have one, flat in the parameter's memory order."""
        grads: dict[int, Tensor] = {}
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None and not is_placeholder(parameter.grad):
                self._grad(ShardRange(i, 0, 0, 0, 0), grads)
        return grads

    def stretch_grads(self, bucket: BucketViews, rank: int, flat_grads: dict[int, Tensor]) -> list[Tensor]:
        """Return the gradients of one rank's stretches, zeros where there is none; new flat ones go to `flat_grads`."""
        return [self._grad(stretch, flat_grads) for stretch in bucket.stretches[rank]]

    def all_stretch_grads(self, bucket: BucketViews, flat_grads: dict[int, Tensor]) -> list[list[Tensor]]:
        return [self.stretch_grads(bucket, rank, flat_grads) for rank in range(self.ranks)]

    def local_shard_grads(
        self, bucket: BucketViews, flat_grads: dict[int, Tensor], kinds: Sequence[int]
    ) -> list[Tensor]:
        """Return this rank's gradients of its shards, not averaged; empty where no rank has one."""
        return [
            reshape_like(self._grad(shard, flat_grads), view) if kinds[shard.param] else view.new_empty(0)
            for shard, view in bucket.own
        ]

    def _grad(self, shard: ShardRange, flat_grads: dict[int, Tensor]) -> Tensor:
        parameter, flat_grad = self.parameters[shard.param], flat_grads.get(shard.param)
        if parameter.grad is None or is_placeholder(parameter.grad):
            return parameter.detach().new_zeros(shard.count)
        if flat_grad is None:
            grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            flat_grad = flat_grads[shard.param] = in_order_of(grad, parameter)
        return flat_grad[shard.begin : shard.end]


def _refuse_overlap(parameters: Sequence[Tensor]) -> None:
    for i, parameter in enumerate(parameters):
        if torch._debug_has_internal_overlap(parameter) == 1:
            raise ShardError(f"elements of parameter {i} of shape {tuple(parameter.shape)} overlap; make it contiguous")
    spans = sorted((p.data_ptr(), p.data_ptr() + _extent(p), i) for i, p in enumerate(parameters) if p.numel())
    for (_, end, i), (begin, _, k) in itertools.pairwise(spans):
        if begin < end and parameters[i].device == parameters[k].device:
            raise ShardError(
                f"parameters {i} and {k} share memory, which can't have two owners; tie them as one Parameter"
            )


def _extent(parameter: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return (last + 1) * parameter.element_size()


def _mark(parameter: Tensor) -> Mark:
    return parameter.data_ptr(), tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device


def _spec(mark: Mark) -> str:
    _, shape, strides, dtype, device = mark
    return f"{dtype}{list(shape)} with strides {strides} on {device}"
