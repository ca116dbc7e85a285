"""Divide the states of an optimizer into a few parts that are offloaded or kept as a whole, and say what a step trains.

    AdamW over 12 layers, 25.3M parameters   ->   8 parts of about 25 MB

The owners of a part are parameters, or the numbers of a sharded optimizer's buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from passes.ir.machine import SMALLEST_STREAMED

from ..graph.captured import Captured
from .optimizer_clone import ClonedOptimizer, UntriedUpdateError
from .optimizer_profiler import OptimizerProfiler, ParameterKind
from .trial_copy import parts_of
from .update_unit import UpdateUnit, unit_of

PARTS = 8
Owner = Tensor | int


@dataclass(frozen=True, eq=False)
class StatePart:
    """Consecutive parameters or buckets, and the bytes of their elementwise states."""

    owners: tuple[Owner, ...]
    nbytes: int

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(owner for owner in self.owners if isinstance(owner, Tensor))


@dataclass(frozen=True, eq=False)
class TrainedParameters:
    """The parameters whose gradients a step computes, and the states of the optimizer in parts."""

    parameters: Sequence[Tensor]
    parts: Sequence[StatePart]
    updates: Mapping[str, Tensor] = field(default_factory=dict)  # those that backward updates, by the names of the ops
    shards: frozenset[int] = frozenset()  # the buckets that backward reduces over ranks
    gathers: frozenset[int] = frozenset()  # the buckets that forward gathers
    captured: Captured | None = None


def state_parts(optimizer: torch.optim.Optimizer, each: bool = False) -> list[StatePart]:
    """Return the states of large parameters in parts of about equal bytes, or one part for `each` parameter.

    There are none if the optimizer has no states, or its step can't be cut.
    """
    try:
        chain = parts_of(optimizer)
    except UntriedUpdateError:
        return []
    sizes = [size for part in chain for size in _states_nbytes(part)]
    return partition_states(sizes, 0 if each else PARTS)


def partition_states(sizes: Iterable[tuple[Owner, int]], count: int) -> list[StatePart]:
    """Divide states of so many bytes into about `count` parts; 0: one part for each owner."""
    owners = [(owner, nbytes) for owner, nbytes in sizes if nbytes]
    share = sum(nbytes for _, nbytes in owners) / count if count else 0
    parts: list[StatePart] = []
    for owner, nbytes in owners:
        if not parts or parts[-1].nbytes >= share:
            parts.append(StatePart((), 0))
        parts[-1] = StatePart((*parts[-1].owners, owner), parts[-1].nbytes + nbytes)
    return parts


def is_large(parameter: Tensor) -> bool:
    """Return True if a parameter is worth the copies to a tier, and so are its gradient and its states."""
    return parameter.nbytes >= SMALLEST_STREAMED


def _states_nbytes(optimizer: torch.optim.Optimizer) -> list[tuple[Owner, int]]:
    unit = unit_of(optimizer)
    of = _elementwise_nbytes(optimizer) if unit is UpdateUnit.ELEMENT else _leaves_nbytes(optimizer)
    return [
        (parameter, of(i, parameter))
        for i, group in enumerate(optimizer.param_groups if unit is not UpdateUnit.ALL else ())
        for parameter in filter(is_large, group["params"])
        if parameter.requires_grad or parameter in optimizer.state
    ]


def _elementwise_nbytes(optimizer: torch.optim.Optimizer) -> Callable[[int, Tensor], int]:
    clone = ClonedOptimizer(optimizer)

    def nbytes(group: int, parameter: Tensor) -> int:
        dtypes = clone.state_dtypes(group, parameter.dtype).values()
        return parameter.numel() * sum(dtype.itemsize for dtype in dtypes if dtype)

    return nbytes


def _leaves_nbytes(optimizer: torch.optim.Optimizer) -> Callable[[int, Tensor], int]:
    layouts = OptimizerProfiler(optimizer).layouts

    def nbytes(group: int, parameter: Tensor) -> int:
        return sum(spec.nbytes for spec in layouts(ParameterKind.of(group, parameter)).values())

    return nbytes
