"""Average gradients over the ranks, for the shards that this rank updates.

    rank 0: g f32[8] of a bucket     rank 1: g f32[8]     ->   f32[4] of their mean on each
    rank 0: sparse rows 3, 5         rank 1: rows 5, 8    ->   on the owner: rows 3, 5, 8, those of 5 added

Averages may exist already: clipped before the step, left by the backward of a compiled module, or equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, optim

from ..errors import ShardError
from .clip_norm import AveragedGrads, ReplicatedGrads
from .comm.exchange import BucketComm
from .comm.shared_memory import SharedMemoryComm
from .grad_presence import SPARSE
from .sharded_grads import ShardedGradients
from .shards.layout import ShardLayout
from .shards.shard_optimizer import ShardOptimizer
from .shards.shard_views import BucketViews

Grads = Callable[[], list[Tensor]]  # waits, and returns the mean gradient of each of this rank's shards of a bucket
DENSIFIED = (optim.SGD, optim.Adagrad)  # to these a row of zeros is the same as a missing row


class GradAverager:
    """Averages of one optimizer's gradients; `clipped` are those that wait for the next step."""

    def __init__(
        self, layout: ShardLayout, comm: BucketComm, optimizer: ShardOptimizer, sharded_grads: ShardedGradients
    ) -> None:
        self.layout, self.comm, self.optimizer, self.sharded_grads = layout, comm, optimizer, sharded_grads
        self.replicated = sharded_grads.replicated
        self.clipped: AveragedGrads | None = None
        self.shared_memory: SharedMemoryComm | None = None
        self.flat_grads: dict[int, Tensor] = {}  # while they are averaged

    def check_grads(self) -> None:
        """Forget averages of gradients that have been replaced."""
        pairs = [(i, p, p.grad) for i, p in enumerate(self.layout.parameters) if p.grad is not None]
        for i, p, grad in pairs:
            if grad.dtype != p.dtype or grad.device != p.device:
                kind = f"{grad.dtype} on {grad.device}"
                raise ShardError(f"parameter {i} is {p.dtype} on {p.device}, its gradient {kind}; make them the same")
        if not self.replicated and not self.comm.fits_wire(grad for _, _, grad in pairs if not grad.is_sparse):
            raise ShardError(f"gradients leave the range of {self.comm.wire}; use wire_dtype=torch.bfloat16")
        if self.clipped is not None and not self.clipped.is_current(self.layout.parameters):
            self.clipped = None

    def begin(self) -> None:
        """Flatten gradients that other ranks read, and exchange their addresses."""
        self.shared_memory = self.comm.shared_memory if self.layout.is_dense_on_cpu else None
        self.flat_grads.clear()
        if self.shared_memory is not None:
            if not self.replicated and self.clipped is None:
                self.flat_grads = self.layout.flatten_grads()
            self.shared_memory.share_addresses(self.flat_grads, self.layout.parameters)

    def end(self) -> None:
        self.flat_grads.clear()

    def start(self, bucket: BucketViews) -> Grads:
        if self.clipped is not None:
            clipped = self.clipped.of_bucket(bucket)
            return lambda: clipped
        if (sharded := self.sharded_grads.start(bucket)) is not None:
            return sharded
        layout, flat_grads = self.layout, self.flat_grads
        if self.replicated:
            local = layout.local_shard_grads(bucket, flat_grads, self.sharded_grads.kinds)
            return lambda: local
        if self.shared_memory is not None:
            reader, own = self.shared_memory, layout.stretch_grads(bucket, layout.rank, flat_grads)
            return lambda: bucket.shard_grads(reader.average(bucket, own))
        wait = self.comm.reduce(bucket.bucket, layout.all_stretch_grads(bucket, flat_grads))
        return lambda: bucket.shard_grads(wait())

    def average_all(self, kinds: Sequence[int]) -> AveragedGrads:
        kind = ReplicatedGrads if self.replicated else AveragedGrads
        return kind(self.layout.parameters, kinds, self._all(kinds))

    def assign_all(self, kinds: Sequence[int]) -> None:
        for bucket, grads in self._all(kinds):
            bucket.assign_grads(grads, kinds)

    def _all(self, kinds: Sequence[int]) -> list[tuple[BucketViews, list[Tensor]]]:
        self.begin()
        started = [(bucket, self.start(bucket)) for bucket in self.buckets_with_grads(kinds)]
        averages = [(bucket, wait()) for bucket, wait in started]
        if self.shared_memory is not None:
            self.shared_memory.meet("averaging of the gradients")
        self.end()
        if self.optimizer.splits or self.clipped is not None or SPARSE not in kinds:
            return averages
        return [(bucket, self._with_sparse(bucket, grads, kinds)) for bucket, grads in averages]

    def _with_sparse(self, bucket: BucketViews, grads: list[Tensor], kinds: Sequence[int]) -> list[Tensor]:
        of_item = dict(zip((shard.param for shard, _ in bucket.own), grads, strict=True))
        for shard in bucket.bucket.shards:
            if kinds[shard.param] != SPARSE:
                continue
            parameter = self.layout.parameters[shard.param]
            grad = parameter.grad if self.replicated else average_sparse(self.comm, parameter, shard.rank)
            if shard.rank == self.comm.rank and grad is not None:
                of_item[shard.param] = grad
        return list(of_item.values())

    def buckets_with_grads(self, kinds: Sequence[int]) -> list[BucketViews]:
        """Return the buckets in which any rank has a gradient."""
        if self.optimizer.splits and SPARSE in kinds and self.optimizer.kind not in DENSIFIED:
            name = self.optimizer.name
            raise ShardError(f"{name} does not support sparse gradients, please consider SparseAdam instead")
        return [bucket for bucket in self.layout.buckets if any(kinds[item] for item in bucket.bucket.params)]


def average_sparse(comm: BucketComm, parameter: Tensor, owner: int) -> Tensor | None:
    """Return the mean of a sparse gradient over ranks, on its owner."""
    local = _coalesced(parameter)
    device = parameter.device
    counts = [float(local._nnz()), float(local.sparse_dim())] if local is not None else [0.0, 0.0]
    table = comm.all_gather(comm.tensor(counts, torch.float64, device)).long()
    dims = int(table[:, 1].max())
    if comm.rank != owner:
        if local is not None and local._nnz():
            comm.p2p.send([local.indices(), local.values()], owner)
        return None
    parts = []
    for rank in range(comm.ranks):
        count = int(table[rank, 0])
        if rank == owner and local is not None:
            parts.append((local.indices(), local.values()))
        elif rank != owner and count:
            indices = torch.empty(dims, count, dtype=torch.int64, device=device)
            values = torch.empty(count, *parameter.shape[dims:], dtype=parameter.dtype, device=device)
            comm.p2p.receive([indices, values], rank)
            parts.append((indices, values))
    indices, values = (torch.cat(some, dim) for some, dim in zip(zip(*parts, strict=True), (1, 0), strict=True))
    total = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()
    return total.div_(comm.ranks)


def _coalesced(parameter: Tensor) -> Tensor | None:
    grad = parameter.grad
    if grad is None:
        return None
    return (grad.detach() if grad.is_sparse else grad.detach().to_sparse()).coalesce()
