"""The optimizer's state as DTensors, for torch.distributed.checkpoint.

    rank 0: exp_avg of w[0:6], flat     rank 1: exp_avg of w[6:8], of b, of v
    ->  {"state": {0: {"exp_avg": DTensor(f32[4, 2], Shard(0))}, ...}, "param_groups": [...]} on both

Names and shapes are those of the plain optimizer's state dict. Elements are sent to the rank with their row, tensor
after tensor. An entry with another shape than its parameter stays on its owner, as a plain tensor.

Move elements of a tensor between the optimizer's shards and the rows of a DTensor.

    shards  [0:6] of 0 | [6:8] of 1      rows of 2, four in all: [0:4] of 0 | [4:8] of 1
    ->      elements 4:6 go from rank 0 to rank 1, the rest stays

Each rank sends one message to each other rank, for one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from passes.shards import ShardRange

from ...optim.trained_parameters import is_large
from ...storage.mapped_storage import BufferLocation, MappedBuffer, TensorSpec
from ...storage.spill_file import SpillError, whole_pages
from ...tensors.layout import alias_storage_as, flat, is_dense
from ..comm.watchdog import CollectiveWatchdog
from ..shards.shard_views import in_order_of
from .full_state import has_shard_shape
from .own_state import Entries, Key, OwnState, copied, key
from .state_outline import Kind, Outline, kinds

CHUNK = 64 << 20  # bytes of a file: a process may open only so many


def to_dtensors(own: OwnState, buffers: DiskBuffers | None, incomplete: bool) -> dict[int, dict[str, Any]]:
    """Return a copy of the state of each parameter, with this rank's rows of tensors; a collective.

    Args:
        buffers: where rows are copied to; None for memory.
    """
    entries = own.entries()
    outlines, mesh = own.outlines(entries, incomplete), _mesh(own)
    state: dict[int, dict[str, Any]] = {}
    for item, shards in enumerate(own.layout.shards_by_parameter()):
        first, parameter = outlines.get(key(shards[0])), own.layout.parameters[item]
        for name, given in first["dict"] if first else ():
            kind = _row_kind(parameter, shards, given)
            values = {key(shard): entries[key(shard)][name] for shard in shards if key(shard) in entries}
            if kind is not None:
                rows = rows_of(kind, len(own.watchdog.members))
                local = rows.local(own.rank, kind, own.watchdog.device)
                local = local if buffers is None else buffers.empty_like(local)
                if len(shards) == 1:
                    values = {at: in_order_of(value, parameter) for at, value in values.items()}
                Transfer(own.watchdog, kind, shards, rows).to_rows(values, local)
                state.setdefault(item, {})[name] = _dtensor(mesh, kind, rows, local)
            elif values:
                state.setdefault(item, {})[name] = copied(next(iter(values.values())))
    return state


def from_dtensors(own: OwnState, state: Mapping[int, Entries]) -> Mapping[Key, Entries]:
    """Return what this rank's shards have of such a state; a collective."""
    entries: dict[Key, dict[str, Any]] = {}
    for item, shards in enumerate(own.layout.shards_by_parameter()):
        for name, value in state.get(item, {}).items():
            parts = _shards_of_rows(own, value, item, shards) if isinstance(value, DTensor) else {}
            for shard in (shard for shard in shards if shard.rank == own.rank):
                entries.setdefault(key(shard), {})[name] = parts[key(shard)] if parts else copied(value)
    return entries


def _shards_of_rows(own: OwnState, value: DTensor, item: int, shards: Sequence[ShardRange]) -> dict[Key, Tensor]:
    kind = _like(own.layout.parameters[item], value.dtype)
    rows = rows_of(kind, len(own.watchdog.members))
    flat_shards = Transfer(own.watchdog, kind, shards, rows).to_shards(value.to_local())
    if len(shards) > 1:
        return flat_shards
    return {at: part.as_strided(kind.shape, kind.strides) for at, part in flat_shards.items()}


def placement_mismatch(own: OwnState, parameter: Tensor, value: Any) -> str | None:
    """Describe how an entry of a sharded state is placed if it should be placed otherwise; None if it is right."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not _has_rows(parameter):
        return "in rows, a DTensor, and is whole in sharded_state_dict()" if isinstance(value, DTensor) else None
    if not isinstance(value, DTensor):
        return "as a whole, and in rows in sharded_state_dict(), a DTensor" if own.optimizer.splits else None
    kind, ranks = _like(parameter, value.dtype), value.device_mesh.mesh.tolist()
    if ranks != own.watchdog.members:
        return f"on ranks {ranks}, and the optimizer is on {own.watchdog.members}"
    rows = rows_of(kind, len(ranks))
    wanted, local = rows.local(own.rank, kind, torch.device("meta")), value.to_local()
    if list(value.placements) != [Shard(rows.dim)] or _memory_order(local) != _memory_order(wanted):
        return f"in rows as sharded_state_dict() has none: {value.placements}, {list(local.shape)} on this rank"
    return None


def empty_dtensor(own: OwnState, item: int, dtype: torch.dtype) -> DTensor:
    kind = _like(own.layout.parameters[item], dtype)
    rows = rows_of(kind, len(own.watchdog.members))
    return _dtensor(_mesh(own), kind, rows, rows.local(own.rank, kind, own.watchdog.device).zero_())


def _mesh(own: OwnState) -> DeviceMesh:
    return DeviceMesh.from_group(own.watchdog.group, own.watchdog.device.type)


def _row_kind(parameter: Tensor, shards: Sequence[ShardRange], given: Outline) -> Kind | None:
    """Return the kind of the whole entry if it has the shape of its parameter."""
    if not isinstance(given, dict) or "tensor" not in given or not _has_rows(parameter):
        return None
    (kind,) = kinds(given)
    if has_shard_shape(given, shards[0]) if len(shards) > 1 else kind.shape == parameter.shape:
        return _like(parameter, kind.dtype)
    return None


def _memory_order(tensor: Tensor) -> list[tuple[int, int]]:
    """Return shape and strides of the dimensions of more than one element."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride) for size, stride in pairs if size != 1] if tensor.numel() else []


def _has_rows(parameter: Tensor) -> bool:
    return bool(parameter.dim() and parameter.numel())


def _like(parameter: Tensor, dtype: torch.dtype) -> Kind:
    strides = parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
    return Kind(dtype, tuple(parameter.shape), tuple(strides))


def _dtensor(mesh: DeviceMesh, kind: Kind, rows: Rows, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, mesh, [Shard(rows.dim)], run_check=False, shape=torch.Size(kind.shape), stride=kind.strides
    )


class DiskBuffers:
    """Buffers in unnamed files, for copies of offloaded states: saving them takes no memory then."""

    def __init__(self, where: BufferLocation) -> None:
        self.where = where
        self.buffer: MappedBuffer | None = None
        self.used = 0  # bytes of the buffer

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return a tensor on disk, or the given one if it is small or the disk is full."""
        if is_large(tensor):
            with suppress(SpillError):
                return alias_storage_as(self._allocate(tensor.untyped_storage().nbytes()), tensor)
        return tensor

    def _allocate(self, nbytes: int) -> Tensor:
        if self.buffer is None or self.used + nbytes > self.buffer.nbytes:
            spec = TensorSpec((max(CHUNK, nbytes),), (1,), torch.uint8)
            self.buffer, self.used = MappedBuffer([spec], self.where), 0
        begin, self.used = self.used, self.used + whole_pages(nbytes)
        return self.buffer.mapping.bytes_at(begin, nbytes)


@dataclass(frozen=True)
class Rows:
    """A tensor divided among ranks along the dimension that is outermost in memory."""

    dim: int
    bounds: tuple[int, ...]  # rank r has elements [bounds[r], bounds[r + 1]) in memory order
    row_size: int  # elements

    def local(self, rank: int, kind: Kind, device: torch.device) -> Tensor:
        shape = list(kind.shape)
        shape[self.dim] = (self.bounds[rank + 1] - self.bounds[rank]) // self.row_size
        return torch.empty_strided(shape, kind.strides, dtype=kind.dtype, device=device)


def rows_of(kind: Kind, ranks: int) -> Rows:
    """Divide a tensor into as many rows for each rank as DTensor's `Shard` does."""
    dim = max(range(len(kind.shape)), key=lambda d: (kind.shape[d] > 1, kind.strides[d], -d))
    count, row_size = kind.shape[dim], math.prod(kind.shape) // kind.shape[dim]
    part = -(-count // ranks)
    return Rows(dim, tuple(min(rank * part, count) * row_size for rank in range(ranks + 1)), row_size)


@dataclass(frozen=True)
class Overlap:
    """Elements [begin, end) of a parameter that are in `shard` and in the rows of `rank`."""

    shard: ShardRange
    rank: int
    begin: int
    end: int

    def of_shard(self) -> slice:
        return slice(self.begin - self.shard.begin, self.end - self.shard.begin)

    def of_rows(self, first: int) -> slice:
        return slice(self.begin - first, self.end - first)


def overlaps(shards: Sequence[ShardRange], rows: Rows) -> Iterator[Overlap]:
    for shard in shards:
        for rank, (first, last) in enumerate(pairwise(rows.bounds)):
            begin, end = max(first, shard.begin), min(last, shard.end)
            if begin < end:
                yield Overlap(shard, rank, begin, end)


class Transfer:
    """One tensor between shards and rows, on all ranks at once."""

    def __init__(self, watchdog: CollectiveWatchdog, kind: Kind, shards: Sequence[ShardRange], rows: Rows) -> None:
        self.watchdog, self.kind, self.rank = watchdog, kind, watchdog.group.rank()
        every = list(overlaps(shards, rows))
        self.in_shards = [each for each in every if each.shard.rank == self.rank]
        self.in_rows = [each for each in every if each.rank == self.rank]
        self.first = rows.bounds[self.rank]
        self.name = f"exchange of the state of parameter {shards[0].param}"

    def to_rows(self, shards: Mapping[Key, Tensor], local: Tensor) -> None:
        """Fill this rank's rows, `local`, from the flat shards of all ranks."""
        parts = [shards[key(each.shard)][each.of_shard()] for each in self.in_shards]
        to, source = [each.rank for each in self.in_shards], lambda each: each.shard.rank
        for each, part in self._exchange(parts, to, self.in_rows, source):
            flat(local)[each.of_rows(self.first)].copy_(part)

    def to_shards(self, local: Tensor) -> dict[Key, Tensor]:
        """Return this rank's shards, flat and in host memory, from the rows of all ranks."""
        parts = [flat(local)[each.of_rows(self.first)] for each in self.in_rows]
        to, source = [each.shard.rank for each in self.in_rows], lambda each: each.rank
        shards = {key(each.shard): torch.empty(each.shard.count, dtype=self.kind.dtype) for each in self.in_shards}
        for each, part in self._exchange(parts, to, self.in_shards, source):
            shards[key(each.shard)][each.of_shard()].copy_(part)
        return shards

    def _exchange(
        self, parts: Sequence[Tensor], to: Sequence[int], wanted: Sequence[Overlap], source: Callable[[Overlap], int]
    ) -> list[tuple[Overlap, Tensor]]:
        """Send parts to ranks, and return what arrives; both sides have the same order of overlaps."""
        ranks, size = range(len(self.watchdog.members)), self.kind.dtype.itemsize
        sent = [[part for part, rank in zip(parts, to, strict=True) if rank == each] for each in ranks]
        ordered = [each for rank in ranks for each in wanted if source(each) == rank]
        sent_nbytes = [sum(part.numel() for part in each) * size for each in sent]
        received_nbytes = [sum(o.end - o.begin for o in wanted if source(o) == rank) * size for rank in ranks]
        message = torch.cat([torch.empty(0, dtype=self.kind.dtype), *(part.cpu() for each in sent for part in each)])
        received = self._all_to_all(message.view(torch.uint8), sent_nbytes, received_nbytes).view(self.kind.dtype)
        return list(zip(ordered, received.split([each.end - each.begin for each in ordered]), strict=True))

    def _all_to_all(self, message: Tensor, sent_nbytes: list[int], received_nbytes: list[int]) -> Tensor:
        if len(self.watchdog.members) == 1:
            return message
        received = torch.empty(sum(received_nbytes), dtype=torch.uint8, device=self.watchdog.device)
        given, group = message.to(self.watchdog.device), self.watchdog.group
        with self.watchdog.naming(self.name):
            work = dist.all_to_all_single(received, given, received_nbytes, sent_nbytes, group=group, async_op=True)
            self.watchdog.wait(work)
        return received.cpu()
