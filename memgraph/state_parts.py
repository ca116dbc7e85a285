"""The states of an optimizer in a few parts, each of which lives on the device or far from it.

AdamW over 12 layers, 25.3M parameters   ->   8 parts of about 25 MB
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from passes.greedy import SMALLEST_HOME

from .pointwise import Alone, is_pointwise

PARTS = 8


@dataclass(frozen=True, eq=False)
class StatePart:
    """Parameters that follow one another, and the bytes of those of their states that have an element for each of
    theirs."""

    parameters: tuple[Tensor, ...]
    nbytes: int


def state_parts(optimizer: torch.optim.Optimizer, each: bool = False) -> list[StatePart]:
    """The states of large parameters, cut into parts of about the same bytes, or those of each for themselves; none, if
    the optimizer's update can't be run in windows, or if it has no states."""
    if not is_pointwise(optimizer):
        return []
    sizes = _nbytes(optimizer)
    share = 0 if each else sum(nbytes for _, nbytes in sizes) / PARTS
    parts: list[StatePart] = []
    for parameter, nbytes in sizes:
        if not parts or parts[-1].nbytes >= share:
            parts.append(StatePart((), 0))
        parts[-1] = StatePart((*parts[-1].parameters, parameter), parts[-1].nbytes + nbytes)
    return parts


def is_large(parameter: Tensor) -> bool:
    """Whether it is worth a trip to the far tier, and so are its gradient and its states."""
    return parameter.nbytes >= SMALLEST_HOME


def _nbytes(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, int]]:
    """Each large parameter that is trained or was, and the bytes of its states."""
    alone, found = Alone(optimizer), list[tuple[Tensor, int]]()
    for i, group in enumerate(optimizer.param_groups):
        for parameter in filter(is_large, group["params"]):
            if parameter.requires_grad or parameter in optimizer.state:
                dtypes = alone.entries(i, parameter.dtype).values()
                found.append((parameter, parameter.numel() * sum(dtype.itemsize for dtype in dtypes if dtype)))
    return [(parameter, nbytes) for parameter, nbytes in found if nbytes]
