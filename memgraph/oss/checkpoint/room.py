"""Allocate what a checkpoint folder has of an optimizer's state, as this rank needs it.

optimizer.state.0.exp_avg f32[7, 2]   ->   {"state": {"0": {"exp_avg": DTensor(f32[4, 2], Shard(0))}}, ...}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...errors import StateError
from .own_state import OwnState
from .safe_reader import METADATA, Reader
from .sharded_state import empty_dtensor

ELSEWHERE = object()  # an entry that only other ranks read


def read_metadata(folder: Path) -> Metadata:
    try:
        metadata = Reader(folder).read_metadata()
    except NotADirectoryError as error:
        advice = "give a folder of save_sharded, or load a file with memgraph.load_state"
        raise StateError(f"{folder} is no folder; {advice}") from error
    except FileNotFoundError as error:
        raise StateError(f"there is no checkpoint in {folder}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise StateError(f"{folder / METADATA} is damaged: {error}") from error
    if not any(name.startswith("optimizer.param_groups.0.") for name in metadata.state_dict_metadata):
        raise StateError(f"{folder} has no 'optimizer' in it; save it with save_sharded")
    return metadata


def refuse_other_model(metadata: Metadata, model: Mapping[str, Any]) -> None:
    entries = {name: each for name, each in metadata.state_dict_metadata.items() if name.startswith("model.")}
    saved = {name[6:]: each for name, each in entries.items() if isinstance(each, TensorStorageMetadata)}
    wanted = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    if strange := sorted(set(saved) ^ set(wanted)):
        raise StateError(f"it is of another model: {strange[0]!r} is only in one of them; nothing was changed")
    for name, tensor in wanted.items():
        size, dtype = saved[name].size, saved[name].properties.dtype
        if (size, dtype) != (tensor.shape, tensor.dtype):
            kinds = f"{dtype}{list(size)} in it and {tensor.dtype}{list(tensor.shape)} in the model"
            raise StateError(f"it is of another model: {name!r} is {kinds}; nothing was changed")


def allocate_state(own: OwnState, metadata: Metadata) -> dict[str, Any]:
    """Return a state dict that torch.distributed.checkpoint fills with this rank's part of a checkpoint."""
    owned = {shard.param for shard, _ in own.layout.own_shards()}
    tree: dict[Any, Any] = {"state": {}, "param_groups": {}}
    for name, entry in metadata.state_dict_metadata.items():
        top, *path = metadata.planner_data[name]
        if top == "optimizer" and path[0] == "param_groups":
            _put(tree, path, None)
        elif top == "optimizer" and path[0] == "state":
            value = _allocate(own, entry, path, owned)
            if value is not ELSEWHERE:
                _put(tree, path, value)
    return {"state": _with_lists(tree["state"]), "param_groups": _with_lists(tree["param_groups"])}


def _allocate(own: OwnState, entry: object, path: Sequence[Any], owned: Collection[int]) -> Any:
    """Allocate rows on each rank if an entry has its parameter's shape, else all of it on the owners."""
    item, parameters = int(path[1]), own.layout.parameters
    if item >= len(parameters):
        raise StateError(f"it has a state of parameter {item}, and the optimizer has {len(parameters)}")
    if isinstance(entry, TensorStorageMetadata):
        shape, dtype = entry.size, entry.properties.dtype
        if len(path) == 3 and shape == parameters[item].shape and shape.numel() and len(shape):
            return empty_dtensor(own, item, dtype)
        return torch.zeros(shape, dtype=dtype) if item in owned else ELSEWHERE
    return None if item in owned else ELSEWHERE


def _put(tree: dict[Any, Any], path: Sequence[Any], value: object) -> None:
    *keys, last = path
    for key in keys:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _with_lists(tree: Any) -> Any:
    """Turn dicts with numbers as keys into lists."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(name, int) for name in tree):
        return [_with_lists(tree[name]) for name in sorted(tree)]
    return {name: _with_lists(each) for name, each in tree.items()}
