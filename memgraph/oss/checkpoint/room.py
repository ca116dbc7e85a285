"""Room for what a folder of torch.distributed.checkpoint has of an optimizer, as this rank needs it.

optimizer.state.0.exp_avg f32[7, 2]   ->   {"state": {"0": {"exp_avg": DTensor(f32[4, 2], Shard(0))}}, ...}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...errors import StateError
from .safe_reader import METADATA, Reader
from .sharded_state import empty
from .state_dict import StateDictMixin

NOWHERE = object()


def metadata(whole: Path) -> Metadata:
    """What is in a folder.

    Raises:
        StateError: no checkpoint of a model and its optimizer.
    """
    try:
        found = Reader(whole).read_metadata()
    except NotADirectoryError as error:
        advice = "give a folder of save_sharded, or load a file with memgraph.load_state"
        raise StateError(f"{whole} is no folder; {advice}") from error
    except FileNotFoundError as error:
        raise StateError(f"there is no checkpoint in {whole}") from error
    except Exception as error:  # whatever a damaged pickle raises
        raise StateError(f"{whole / METADATA} is damaged: {error}") from error
    if not any(name.startswith("optimizer.param_groups.0.") for name in found.state_dict_metadata):
        raise StateError(f"{whole} has no 'optimizer' in it; save it with save_sharded")
    return found


def compare_metadata(found: Metadata, there: Mapping[str, Any]) -> None:
    """Refuse another model before anything is changed."""
    tensors = {
        name: value for name, value in found.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }
    saved = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    wanted = {name: value for name, value in there.items() if isinstance(value, torch.Tensor)}
    if strange := sorted(set(saved) ^ set(wanted)):
        raise StateError(f"it is of another model: {strange[0]!r} is only in one of them; nothing was changed")
    for name, tensor in wanted.items():
        kept = saved[name]
        if (kept.size, kept.properties.dtype) != (tensor.shape, tensor.dtype):
            kinds = (
                f"{kept.properties.dtype}{list(kept.size)} in it and {tensor.dtype}{list(tensor.shape)} in the model"
            )
            raise StateError(f"it is of another model: {name!r} is {kinds}; nothing was changed")


def allocate_room(optimizer: StateDictMixin, found: Metadata) -> dict[str, Any]:
    """Where the optimizer's part of a checkpoint goes, on this rank."""
    own = {piece.item for laid in optimizer.layout.buckets for piece, _ in laid.own}
    places: dict[Any, Any] = {"state": {}, "param_groups": {}}
    for name, entry in found.state_dict_metadata.items():
        top, *path = found.planner_data[name]
        if top == "optimizer" and path[0] == "param_groups":
            _put(places, path, None)
        elif top == "optimizer" and path[0] == "state":
            place = _place(optimizer, entry, path, own)
            if place is not NOWHERE:
                _put(places, path, place)
    return {"state": _listed(places["state"]), "param_groups": _listed(places["param_groups"])}


def _place(optimizer: StateDictMixin, entry: object, path: Sequence[Any], own: Collection[int]) -> Any:
    """Where an entry goes: into rows on each rank if it has its parameter's shape, else to the owners alone."""
    item, parameters = int(path[1]), optimizer.layout.parameters
    if item >= len(parameters):
        raise StateError(f"it has a state of parameter {item}, and the optimizer has {len(parameters)}")
    if isinstance(entry, TensorStorageMetadata):
        shape, dtype = entry.size, entry.properties.dtype
        if len(path) == 3 and shape == parameters[item].shape and shape.numel() and len(shape):
            return empty(optimizer, item, dtype)
        return torch.zeros(shape, dtype=dtype) if item in own else NOWHERE
    return None if item in own else NOWHERE


def _put(places: dict[Any, Any], path: Sequence[Any], value: object) -> None:
    *way, last = path
    for step in way:
        places = places.setdefault(step, {})
    places[last] = value


def _listed(places: Any) -> Any:
    """What was a list when it was saved: numbers as names."""
    if not isinstance(places, dict):
        return places
    if places and all(isinstance(name, int) for name in places):
        return [_listed(places[name]) for name in sorted(places)]
    return {name: _listed(each) for name, each in places.items()}
