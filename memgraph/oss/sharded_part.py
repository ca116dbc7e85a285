"""The states of a sharded optimizer in a checkpoint folder: rows of each tensor on each rank.

ShardedPart(optimizer).saved()   ->   {"state": {0: {"exp_avg": DTensor, ...}}, "param_groups": [...]}

Names and shapes are those of the plain optimizer, so that one process, or any number of ranks, loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import StateError
from ..optim.validate_state import class_name
from .checkpoint.checkpoint_folder import CheckpointFolder
from .checkpoint.sharded_state import empty_dtensor
from .checkpoint.training_folder import ELSEWHERE, by_number
from .optimizer import OSS


class ShardedPart:
    """This rank's rows of tensors, and other entries of the parameters that it owns."""

    needed = "optimizer.param_groups.0."

    def __init__(self, optimizer: OSS) -> None:
        self.optimizer, self.own = optimizer, optimizer.states.own
        self.kind = class_name(optimizer.optimizer_class)
        self.converts = bool(optimizer._optimizer_load_state_dict_pre_hooks)
        self.owned = {shard.param for shard, _ in self.own.layout.own_shards()}

    def saved(self) -> dict[str, Any]:
        return self.optimizer.sharded_state_dict()

    def room(self, path: Sequence[Any], entry: object) -> object:
        """Return rows if an entry has its parameter's shape, else all of it on the owners."""
        if path[0] == "param_groups":
            return None
        item, parameters = int(path[1]), self.own.layout.parameters
        if item >= len(parameters):
            raise StateError(f"it has a state of parameter {item}, and the optimizer has {len(parameters)}")
        if isinstance(entry, TensorStorageMetadata):
            shape, dtype = entry.size, entry.properties.dtype
            if len(path) == 3 and shape == parameters[item].shape and shape.numel() and len(shape):
                return empty_dtensor(self.own, item, dtype)
            return torch.zeros(shape, dtype=dtype) if item in self.owned else ELSEWHERE
        return None if item in self.owned else ELSEWHERE

    def checked(self, loaded: Mapping[str, Any], folder: CheckpointFolder) -> Callable[[], None]:
        given = by_number(loaded)
        try:
            self.optimizer.refuse_sharded(given)
        except StateError as error:
            raise StateError(f"the {folder.name} has failed: {error}") from error
        return lambda: self.optimizer.load_sharded_state_dict(given)
