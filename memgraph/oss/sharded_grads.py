"""Gradients that the backward of a compiled module reduces: this rank's shards, and placeholders in `.grad`.

loss.backward()      ->   shards[0]: this rank's part of the mean of bucket 0;  w.grad: a placeholder that reads as NaN
optimizer.step()          uses the shards of parameters that still have their placeholder
zero_grad(), w.grad = None ...   removes or zeroes the placeholder; then the shard counts as None or zero
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from passes.ir.machine import CAST_WORKSPACE
from passes.shards import Bucket, ShardRange

from ..errors import ShardError
from ..guards.owned_tensors import has_hooks
from .comm import shared_memory
from .comm.exchange import BucketComm
from .grad_presence import DENSE, SHARDED
from .shards.layout import ShardLayout
from .shards.shard_views import BucketViews, is_placeholder, is_written, placeholder_grad

MEETING = 64  # bytes that a meeting of the ranks takes for each rank


@dataclass(frozen=True)
class Stretch:
    """Elements [begin, end) of the gradient of a parameter, at offset `at` of a bucket."""

    name: str
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class GradBucket:
    """A bucket that backward reduces: `size` elements, `part` of them for this rank, and `room` bytes of workspace."""

    bucket: int
    stretches: tuple[Stretch, ...]
    size: int
    part: int
    room: int = 0


class ShardedGradients:
    """This rank's shards of the mean gradients of one optimizer, by bucket. `replicated`: gradients are equal on all
    ranks, and backward reduces nothing; `refresh` renews the views of the layout."""

    def __init__(self, layout: ShardLayout, comm: BucketComm, replicated: bool, refresh: Callable[[], None]) -> None:
        self.layout, self.comm, self.replicated, self.refresh = layout, comm, replicated, refresh
        self.shards: dict[int, Tensor] = {}
        self.placeholders: dict[Tensor, Tensor] = {}  # of each parameter
        self.kinds: Sequence[int] = ()  # of each parameter's gradient, the largest on any rank
        self.reduced: list[Tensor] = []  # the parameters of the latest backward

    def grad_buckets(self, named: Mapping[str, Tensor]) -> list[GradBucket]:
        """Return the buckets that backward may reduce; none if a hook wants whole gradients."""
        self.refresh()
        layout, comm = self.layout, self.comm
        # With float16, the step checks the range of gradients before it sends any.
        if self.replicated or comm.wire is torch.float16 or any(map(has_hooks, layout.parameters)):
            return []
        names = {parameter: name for name, parameter in named.items()}
        grad_buckets = []
        for views in layout.buckets:
            bucket = views.bucket
            if bucket.owner is None and bucket.shard_size:
                stretches = tuple(
                    Stretch(names.get(layout.parameters[one.param], ""), one.begin, one.end, one.offset)
                    for one in _joined_stretches(bucket, comm.ranks)
                )
                room = _workspace_nbytes(comm, bucket.shard_size, layout.parameters[bucket.params[0]])
                size = bucket.shard_size * comm.ranks
                grad_buckets.append(GradBucket(views.number, stretches, size, bucket.shard_size, room))
        return grad_buckets

    def begin_backward(self, parameters: Mapping[str, Tensor | None]) -> GradReduction:
        """Return what reduces the gradients of these parameters in a backward that begins."""
        self.refresh()
        self.drop_cleared()
        for name, parameter in parameters.items():
            if parameter is None:
                raise ShardError(
                    f"the gradient of {name} is wanted elsewhere, by torch.autograd.grad, backward(inputs=...) or a "
                    "hook, or was frozen since forward, and backward averages it over the ranks: do without, or "
                    "compile without optimizer="
                )
            if parameter.grad is not None and not is_placeholder(parameter.grad):
                raise ShardError(
                    f"{name} has a gradient from outside of the compiled module, to which backward can't add what it "
                    "averages over the ranks: call optimizer.zero_grad() before"
                )
        self.reduced = [parameter for parameter in parameters.values() if parameter is not None]
        return GradReduction(self.layout, self.comm)

    def add_shards(self, shards: Mapping[int, Tensor]) -> None:
        """Add the shards of a backward that has ended, and set placeholders."""
        for bucket, shard in shards.items():
            total = self.shards.setdefault(bucket, shard)
            if total is not shard:
                total.add_(shard)
        for parameter in self.reduced:
            if parameter not in self.placeholders:
                parameter.grad = self.placeholders[parameter] = placeholder_grad(parameter)

    def start(self, bucket: BucketViews) -> Callable[[], list[Tensor]] | None:
        """Start to complete the averages of a bucket that backward has reduced on any rank; None for other buckets."""
        kinds = [self.kinds[item] for item in bucket.bucket.params]
        if SHARDED not in kinds:
            return None
        layout, first = self.layout, self.layout.rank * bucket.bucket.shard_size
        shard = self.shards.get(bucket.number)
        if shard is None:  # only other ranks have gradients
            shard = layout.parameters[bucket.bucket.params[0]].detach().new_zeros(bucket.bucket.shard_size)
        own = [shard[one.offset - first : one.offset - first + one.count] for one in bucket.stretches[layout.rank]]
        if max(kinds) < DENSE:
            return lambda: bucket.shard_grads(own)
        wait = self.comm.reduce(bucket.bucket, layout.all_stretch_grads(bucket, {}))
        return lambda: bucket.shard_grads([dense.add(part) for dense, part in zip(wait(), own, strict=True)])

    def drop_cleared(self) -> None:
        """Drop the shards of gradients that the caller has set to None, and zero those set to zero."""
        removed = {parameter for parameter, grad in self.placeholders.items() if parameter.grad is not grad}
        written = {p for p, placeholder in self.placeholders.items() if p not in removed and is_written(placeholder)}
        for parameter in written:
            if self.placeholders[parameter].ne(0).any():
                raise ShardError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} was changed, but is sharded over "
                    "the ranks: clip with the optimizer's own clip_grad_norm_, or compile without optimizer="
                )
            parameter.grad = self.placeholders[parameter] = placeholder_grad(parameter)
        for parameter in removed:
            del self.placeholders[parameter]
        if removed or written:
            self._zero(removed | written)

    def refuse_if_any(self) -> None:
        self.drop_cleared()
        if self.shards:
            raise ShardError("parameters were replaced, and the old ones have gradients: call zero_grad() before")

    def _zero(self, parameters: set[Tensor]) -> None:
        layout = self.layout
        items = {i for i, parameter in enumerate(layout.parameters) if parameter in parameters}
        for number, shard in list(self.shards.items()):
            views = layout.buckets[number]
            if not any(layout.parameters[item] in self.placeholders for item in views.bucket.params):
                del self.shards[number]
                continue
            for one in views.stretches[layout.rank]:
                if one.param in items:
                    first = one.offset - layout.rank * views.bucket.shard_size
                    shard[first : first + one.count].zero_()


class GradReduction:
    """The reductions of one backward; see `memgraph.graph.ops.Exchange`."""

    def __init__(self, layout: ShardLayout, comm: BucketComm) -> None:
        self.layout, self.comm = layout, comm
        self.shared_memory = comm.shared_memory if layout.is_dense_on_cpu else None
        self.started: dict[int, Callable[[], Tensor]] = {}

    def begin(self, bucket: int, sent: Tensor) -> None:
        self.started[bucket] = self.reduce(self.layout.buckets[bucket].bucket, sent)

    def reduce(self, bucket: Bucket, sent: Tensor) -> Callable[[], Tensor]:
        """Start to average a packed bucket; the function returns this rank's part."""
        if self.shared_memory is not None and sent.nbytes >= shared_memory.LEAST:
            return self.shared_memory.reduce_packed(bucket, sent)
        return self.comm.reduce_packed(bucket, sent)

    def end(self, bucket: int) -> Tensor:
        return self.started.pop(bucket)()


def _joined_stretches(bucket: Bucket, ranks: int) -> list[ShardRange]:
    """Return the stretches of all ranks, joined where one continues another's parameter."""
    joined: list[ShardRange] = []
    for one in (one for rank in range(ranks) for one in bucket.ranges(rank)):
        if joined and joined[-1].param == one.param:
            joined[-1] = ShardRange(one.param, joined[-1].begin, one.end, joined[-1].rank, joined[-1].offset)
        else:
            joined.append(one)
    return joined


def _workspace_nbytes(comm: BucketComm, part: int, like: Tensor) -> int:
    """Return the bytes that a reduction allocates besides what is sent and this rank's part of the mean.

    On the CPU: the parts received from other ranks, one of them for the mean; with a cast all of these,
    what is sent, and what one of them is cast back to.
    """
    others, itemsize = comm.ranks - 1, like.element_size()
    if like.device.type != "cpu":
        return 0 if dist.get_backend(comm.group) == "nccl" else (others + 1) * part * itemsize
    if comm.wire is None or itemsize <= comm.wire.itemsize:
        return (others - 1) * part * itemsize + MEETING * (others + 1)
    return 2 * others * part * comm.wire.itemsize + part * itemsize + CAST_WORKSPACE
