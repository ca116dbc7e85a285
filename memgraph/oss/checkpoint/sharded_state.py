"""The optimizer's state as torch.distributed.checkpoint takes it, each rank a part of every tensor.

    rank 0: exp_avg of w[0:6], flat     rank 1: exp_avg of w[6:8], of b, of v
    ->  {"state": {0: {"exp_avg": DTensor(f32[4, 2], Shard(0))}, ...}, "param_groups": [...]} on both

Names and shapes are those of the plain optimizer's state dict, so that whatever reads checkpoints reads these. What
lies in rows of another rank is sent there, tensor after tensor; what has not the shape of its parameter stays with its
owner, as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from passes.shards import Piece

from ...tensors.layout import is_dense
from ..comm.watchdog import CollectiveWatchdog
from ..shards.shard_views import in_order_of
from .copies import OffloadedCopies
from .full_state import Entries, copied, is_elementwise, outlines, own_entries, places
from .reshard import Key, Rows, Transfer, key, rows_of
from .state_outline import Kind, Outline, kinds

if TYPE_CHECKING:
    from .state_dict import StateDictMixin


def to_dtensors(oss: StateDictMixin) -> dict[int, dict[str, Any]]:
    """The state of each parameter, of which this rank has a part; a collective. Nothing in it is the live state."""
    held = own_entries(oss)
    told = outlines(oss, held)
    mesh, copies = _mesh_of(oss), OffloadedCopies(oss.offloaded_shards)
    state: dict[int, dict[str, Any]] = {}
    for item, pieces in enumerate(places(oss)):
        first, parameter = told.get(key(pieces[0])), oss.layout.parameters[item]
        for name, given in first["dict"] if first else ():
            kind = _divisible(parameter, pieces, given)
            mine = {key(piece): held[key(piece)][name] for piece in pieces if key(piece) in held}
            if kind is not None:
                state.setdefault(item, {})[name] = _moved(oss.watchdog, mesh, copies, kind, parameter, pieces, mine)
            elif mine:
                state.setdefault(item, {})[name] = copied(next(iter(mine.values())))
    return state


def from_dtensors(oss: StateDictMixin, state: Mapping[int, Entries]) -> Mapping[Key, Entries]:
    """What this rank's pieces have of such a state; a collective."""
    found: dict[Key, dict[str, Any]] = {}
    for item, pieces in enumerate(places(oss)):
        own = [piece for piece in pieces if piece.rank == oss.watchdog.group.rank()]
        for name, value in state.get(item, {}).items():
            parts = (
                _back(oss.watchdog, value, oss.layout.parameters[item], pieces) if isinstance(value, DTensor) else {}
            )
            for piece in own:
                found.setdefault(key(piece), {})[name] = parts[key(piece)] if parts else copied(value)
    return found


def place_of(oss: StateDictMixin, parameter: Tensor, value: Any) -> str | None:
    """Where an entry of a sharded state is that it should not be: in rows, or whole; None if it is right."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not _has_rows(parameter):
        return "in rows, a DTensor, and is whole in sharded_state_dict()" if isinstance(value, DTensor) else None
    if not isinstance(value, DTensor):
        return None if not oss.splits_parameters else "as a whole, and in rows in sharded_state_dict(), a DTensor"
    kind, ranks = _like(parameter, value.dtype), value.device_mesh.mesh.tolist()
    if ranks != oss.watchdog.members:
        return f"on ranks {ranks}, and the optimizer is on {oss.watchdog.members}"
    rows = rows_of(kind, len(ranks))
    wanted, found = rows.local(oss.watchdog.group.rank(), kind, torch.device("meta")), value.to_local()
    if list(value.placements) != [Shard(rows.dim)] or _lies(found) != _lies(wanted):
        return f"in rows as sharded_state_dict() has none: {value.placements}, {list(found.shape)} on this rank"
    return None


def empty(oss: StateDictMixin, item: int, dtype: torch.dtype) -> DTensor:
    """Room for an entry of the shape of its parameter."""
    kind = _like(oss.layout.parameters[item], dtype)
    rows = rows_of(kind, len(oss.watchdog.members))
    return _dtensor(_mesh_of(oss), kind, rows, rows.local(oss.watchdog.group.rank(), kind, oss.watchdog.device).zero_())


def _mesh_of(oss: StateDictMixin) -> DeviceMesh:
    """The ranks of the optimizer, as DTensor wants them."""
    return DeviceMesh.from_group(oss.watchdog.group, oss.watchdog.device.type)


def _divisible(parameter: Tensor, pieces: Sequence[Piece], given: Outline) -> Kind | None:
    """What the whole of an entry is, if it has the shape of its parameter."""
    if not isinstance(given, dict) or "tensor" not in given or not _has_rows(parameter):
        return None
    (kind,) = kinds(given)
    if is_elementwise(given, pieces[0]) if len(pieces) > 1 else kind.shape == parameter.shape:
        return _like(parameter, kind.dtype)
    return None


def _lies(tensor: Tensor) -> list[tuple[int, int]]:
    """Its shape and strides, as far as these matter."""
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


def _moved(
    watchdog: CollectiveWatchdog, mesh: DeviceMesh, copies: OffloadedCopies, kind: Kind, parameter: Tensor,
    pieces: Sequence[Piece], mine: Mapping[Key, Tensor],
) -> DTensor:  # fmt: skip
    rows = rows_of(kind, len(watchdog.members))
    local = copies.room(rows.local(watchdog.group.rank(), kind, watchdog.device))
    whole = len(pieces) == 1
    flats = {at: in_order_of(value, parameter) if whole else value for at, value in mine.items()}
    Transfer(watchdog, kind, pieces, rows).to_rows(flats, local)
    return _dtensor(mesh, kind, rows, local)


def _back(
    watchdog: CollectiveWatchdog, value: DTensor, parameter: Tensor, pieces: Sequence[Piece]
) -> dict[Key, Tensor]:
    kind = _like(parameter, value.dtype)
    found = Transfer(watchdog, kind, pieces, rows_of(kind, len(watchdog.members))).to_pieces(value.to_local())
    if len(pieces) > 1:
        return found
    return {at: part.as_strided(kind.shape, kind.strides) for at, part in found.items()}
