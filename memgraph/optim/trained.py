"""What a planned step trains: parameters, what updates them, and what ranks exchange of them.

optimizer= given         ->   its states, in parts that may live far
fuse_update=True         ->   the parameters that ops in backward update
a sharded optimizer      ->   the buckets that backward sums over ranks, and that forward gathers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..graph.captured import Captured
from .state_parts import StatePart


@dataclass(frozen=True, eq=False)
class TrainedParameters:
    """The parameters that a step makes gradients of, and the states of the optimizer in parts."""

    parameters: Sequence[Tensor]
    parts: Sequence[StatePart]
    updates: Mapping[str, Tensor] = field(default_factory=dict)  # those that backward updates, by the names of the ops
    shards: frozenset[int] = frozenset()  # the buckets that backward sums over ranks
    gathers: frozenset[int] = frozenset()  # those that forward gathers
    captured: Captured | None = None
