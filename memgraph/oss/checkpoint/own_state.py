"""The optimizer states of this rank's shards, and what all ranks hold.

OwnState(layout, optimizer, watchdog).outlines(...)   ->   {(0, 0): {"dict": [["step", 3.0], ...]}, ...} on all ranks
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from passes.shards import ShardRange

from ...errors import StateError
from ..comm.rank_group import all_texts
from ..comm.watchdog import CollectiveWatchdog
from ..shards.layout import ShardLayout
from ..shards.shard_optimizer import ShardOptimizer
from .state_outline import Outline, outline

Key = tuple[int, int]  # a shard: index of its parameter, and its first element
Entries = Mapping[str, Any]  # the state of a parameter or a shard
INCOMPLETE = "a step has failed when some parameters were updated; start again from the last checkpoint"


def key(shard: ShardRange) -> Key:
    return shard.param, shard.begin


@dataclass(frozen=True)
class OwnState:
    """The states of one optimizer's shards on this rank."""

    layout: ShardLayout
    optimizer: ShardOptimizer
    watchdog: CollectiveWatchdog

    @property
    def rank(self) -> int:
        return self.watchdog.group.rank()

    def entries(self) -> dict[Key, Entries]:
        state = self.optimizer.optimizer.state
        return {key(shard): state[view] for shard, view in self.layout.own_shards() if view in state}

    def outlines(self, entries: Mapping[Key, Entries], incomplete: bool) -> dict[Key, Outline]:
        """Return the outlines of the states of all ranks' shards; a collective."""
        error, own = INCOMPLETE if incomplete else "", []
        if not incomplete:
            try:
                own = [[*at, outline(each, f"parameter {at[0]}")] for at, each in entries.items()]
            except StateError as caught:
                error = str(caught)
        text = json.dumps([error, own]).encode()
        texts = list(map(json.loads, all_texts(self.watchdog, text, "exchange of outlines of the state")))
        for rank, (failure, _) in zip(self.watchdog.members, texts, strict=True):
            if failure:
                raise StateError(f"rank {rank} has no state to save: {failure}")
        return {(item, begin): each for _, of_rank in texts for item, begin, each in of_rank}


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(each) for each in value)
    return value
