"""The parameters that a step trains, and which states of its optimizer may be offloaded.

    AdamW over w [1024, 1024] and b [1024]   ->   {w: 8388608}; that of b is not worth a copy

The owner of a state is a parameter, or the number of a sharded optimizer's bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from passes.ir.machine import SMALLEST_STREAMED

from ..graph.captured import Captured
from ..tensors.parameter_groups import parameter_groups
from .trial_copy import UntriedUpdateError, parts_of
from .update_operands import chunked_layouts, state_layouts
from .update_unit import UpdateUnit, unit_of

Owner = Tensor | int


@dataclass(frozen=True, eq=False)
class TrainedParameters:
    """The parameters whose gradients a step computes, and the bytes of the states that may be offloaded."""

    parameters: Sequence[Tensor]
    states: Mapping[Owner, int]
    updates: Mapping[str, Tensor] = field(default_factory=dict)  # those that backward updates, by the names of the ops
    shards: frozenset[int] = frozenset()  # the buckets that backward reduces over ranks
    gathers: frozenset[int] = frozenset()  # the buckets that forward gathers
    captured: Captured | None = None


def movable_states(optimizer: torch.optim.Optimizer) -> dict[Owner, int]:
    """Return the bytes of the states of each large parameter.

    There are none if the optimizer has no states, or its step can't be cut.
    """
    try:
        chain = parts_of(optimizer)
    except UntriedUpdateError:
        return {}
    return {owner: nbytes for part in chain for owner, nbytes in _states_nbytes(part) if nbytes}


def is_large(parameter: Tensor) -> bool:
    """Return True if a parameter is worth the copies to a tier, and so are its gradient and its states."""
    return parameter.nbytes >= SMALLEST_STREAMED


def _states_nbytes(optimizer: torch.optim.Optimizer) -> list[tuple[Owner, int]]:
    if (unit := unit_of(optimizer)) is UpdateUnit.ALL:
        return []
    layouts, whole = state_layouts(optimizer), unit is UpdateUnit.PARAMETER
    return [
        (p, sum(spec.nbytes for spec in chunked_layouts(p, layouts(p), whole).values()))
        for p in filter(is_large, parameter_groups(optimizer))
        if p.requires_grad or p in optimizer.state
    ]
