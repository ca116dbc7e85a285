"""The states of an optimizer in a few parts, each of which lives on the device or far from it.

AdamW over 12 layers, 25.3M parameters   ->   8 parts of about 25 MB

Whose states they are is the parameters', or the buckets' of a sharded optimizer, by their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from passes.ir.machine import SMALLEST_HOME

from ..graph.captured import Captured
from .elementwise import is_elementwise
from .optimizer_clone import ClonedOptimizer

PARTS = 8
Owner = Tensor | int


@dataclass(frozen=True, eq=False)
class StatePart:
    """Parameters or buckets that follow one another, and the bytes of those of their states that have an element for
    each of theirs."""

    owners: tuple[Owner, ...]
    nbytes: int

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(owner for owner in self.owners if isinstance(owner, Tensor))


def state_parts(optimizer: torch.optim.Optimizer, each: bool = False) -> list[StatePart]:
    """The states of large parameters, cut into parts of about the same bytes, or those of each for themselves; none, if
    the optimizer's update can't be run in windows, or if it has no states."""
    if not is_elementwise(optimizer):
        return []
    return partition_states(_nbytes(optimizer), 0 if each else PARTS)


def partition_states(sizes: Iterable[tuple[Owner, int]], count: int) -> list[StatePart]:
    """The states of these owners, of so many bytes each, in about so many parts; each for itself if that is 0."""
    known = [(owner, nbytes) for owner, nbytes in sizes if nbytes]
    share = sum(nbytes for _, nbytes in known) / count if count else 0
    parts: list[StatePart] = []
    for owner, nbytes in known:
        if not parts or parts[-1].nbytes >= share:
            parts.append(StatePart((), 0))
        parts[-1] = StatePart((*parts[-1].owners, owner), parts[-1].nbytes + nbytes)
    return parts


def is_large(parameter: Tensor) -> bool:
    """Whether it is worth a trip to the far tier, and so are its gradient and its states."""
    return parameter.nbytes >= SMALLEST_HOME


def _nbytes(optimizer: torch.optim.Optimizer) -> list[tuple[Owner, int]]:
    """Each large parameter that is trained or was, and the bytes of its states."""
    clone, found = ClonedOptimizer(optimizer), list[tuple[Owner, int]]()
    for i, group in enumerate(optimizer.param_groups):
        for parameter in filter(is_large, group["params"]):
            if parameter.requires_grad or parameter in optimizer.state:
                dtypes = clone.state_dtypes(i, parameter.dtype).values()
                found.append((parameter, parameter.numel() * sum(dtype.itemsize for dtype in dtypes if dtype)))
    return found


@dataclass(frozen=True, eq=False)
class TrainedParameters:
    """The parameters that a step makes gradients of, and the states of the optimizer in parts."""

    parameters: Sequence[Tensor]
    parts: Sequence[StatePart]
    updates: Mapping[str, Tensor] = field(default_factory=dict)  # those that backward updates, by the names of the ops
    shards: frozenset[int] = frozenset()  # the buckets that backward sums over ranks
    gathers: frozenset[int] = frozenset()  # those that forward gathers
    captured: Captured | None = None
