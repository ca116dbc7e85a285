"""The optimizer's state as DTensors, for torch.distributed.checkpoint.

    rank 0: exp_avg of w[0:6], flat     rank 1: exp_avg of w[6:8], of b, of v
    ->  {"state": {0: {"exp_avg": DTensor(f32[4, 2], Shard(0))}, ...}, "param_groups": [...]} on both

Names and shapes are those of the plain optimizer's state dict. Elements are sent to the rank with their row, tensor
after tensor. An entry with another shape than its parameter stays on its owner, as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from passes.shards import ShardRange

from ...optim.trained_parameters import is_large
from ...storage.mapped_storage import BufferLocation, MappedBuffer, TensorSpec
from ...storage.spill_file import SpillError, whole_pages
from ...tensors.layout import alias_storage_as, is_dense
from ..shards.shard_views import in_order_of
from .full_state import has_shard_shape
from .own_state import Entries, Key, OwnState, copied, key
from .reshard import Rows, Transfer, rows_of
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
