"""Offload optimizer state per bucket, and step an offloaded bucket in windows.

    bucket 3 on this rank: 3 MB of parameters, AdamW   ->   6 MB of exp_avg and exp_avg_sq in an unnamed file
    step()                                                  averages, updates in windows, gathers

Parameters and gradients stay on the device, and so do the states of shards that are too small to copy.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import optim

from ..optim.elementwise import is_elementwise, is_nondeterministic
from ..optim.offloaded_update import OffloadedUpdate
from ..optim.placement import OwnedState
from ..optim.trained_parameters import Owner, is_large
from ..optim.windowed_update import WindowedUpdate
from ..storage.places import location_of
from .shards.layout import ShardLayout
from .shards.param_groups import Group
from .shards.shard_optimizer import ShardOptimizer


class OffloadedShards(OffloadedUpdate):
    """The update of shards with offloaded states; states are offloaded by bucket number."""

    def __init__(self, oss: optim.Optimizer, layout: ShardLayout, optimizer: ShardOptimizer) -> None:
        super().__init__(oss)
        self.layout, self.shard_optimizer = layout, optimizer
        self.interrupted: tuple[int, WindowedUpdate] | None = None  # by an error of the disk, in this bucket

    @property
    def can_stream(self) -> bool:
        layout, inner = self.layout, self.shard_optimizer.optimizer
        kinds = {(group, p.dtype) for group, p in zip(layout.group_of, layout.parameters, strict=True)}
        on_cpu = all(p.device.type == "cpu" for p in layout.parameters)
        deterministic = not any(is_nondeterministic(inner, *kind) for kind in kinds)
        return on_cpu and self.shard_optimizer.splits and is_elementwise(inner) and deterministic

    def install(self) -> None:
        """Do nothing: `ShardedStep` calls `update` for offloaded buckets."""

    def forget_interrupted(self) -> None:
        self.interrupted = None

    def states(self, owners: Collection[Owner]) -> list[OwnedState]:
        buckets, state = self.layout.buckets, self.shard_optimizer.optimizer.state
        own = [(i, buckets[i].own) for i in owners if isinstance(i, int) and i < len(buckets)]
        return [(i, state[view]) for i, shards in own for _, view in shards if is_large(view) and view in state]

    def update(self, number: int, group: Group) -> None:
        """Update the shards of a bucket in windows, from the window that a disk error has interrupted."""
        with torch.inference_mode(False), torch.no_grad():
            if self.interrupted is None or self.interrupted[0] != number:
                location = location_of(self.location, number)
                inner = self.shard_optimizer.optimizer
                update = WindowedUpdate(inner, self.current, is_large, location, groups=[group])
                self.interrupted = (number, update)
            self.interrupted[1].run()
            self.interrupted = None
