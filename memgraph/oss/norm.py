"""Clip the averaged gradient by its norm, each rank its pieces.

    each rank: norms of its pieces   ->   norm of each parameter   ->   norm of them all, the same on all ranks

The parts are put together as `torch.nn.utils.clip_grad_norm_` does, parameter by parameter, so that every kind of norm
is what it is there. Each call looks at the gradients that there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .held import Held
    from .optimizer import OSS

SMALL = 1e-6  # torch adds it to the norm


@dataclass(frozen=True)
class Limit:
    """What a norm is to be at most."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool

    def __str__(self) -> str:
        return f"clip_grad_norm_({self.max_norm}, {self.norm_type}, error_if_nonfinite={self.error_if_nonfinite})"


def clip(optimizer: OSS, held: Held, limit: Limit) -> Tensor:
    """Scale the held gradients down to the limit, if their norm is larger; returns that.

    Raises:
        RuntimeError: it is not finite, and that was to be an error. Nothing is scaled.
    """
    total = _total(optimizer, held, limit.norm_type)
    if limit.error_if_nonfinite and not bool(total.isfinite()):
        found = f"the total norm of order {limit.norm_type} of the gradients is {total.item()}, so it can't be clipped"
        raise RuntimeError(f"{found}; with error_if_nonfinite=False it is returned instead")
    coefficient = limit.max_norm / (total + SMALL)
    # Gradients that are not numbers are left as they are: that the norm is none says so.
    if bool(coefficient < 1):
        held.scale(coefficient)
    return total


def _total(optimizer: OSS, held: Held, norm_type: float) -> Tensor:
    parameters = optimizer.pieces.parameters
    norms: list[list[Tensor]] = [[] for _ in parameters]
    for item, gradient in held.own():
        if gradient.numel():
            norms[item].append(_norm(gradient, norm_type))
    identity = math.inf if norm_type < 0 else 0.0
    mine = [float(_joint(parts, norm_type)) if parts else identity for parts in norms]
    every = optimizer.exchange.each(optimizer.exchange.numbers(mine, torch.float64, optimizer.pieces.device))
    used = [item for item, kind in enumerate(held.kinds) if kind and parameters[item].numel()]
    dtype = torch.float64 if any(parameters[item].dtype in WIDE for item in used) else torch.float32
    total = _joint([_joint(list(every[:, item]), norm_type) for item in used], norm_type, nested=True)
    return total.to(optimizer.pieces.device, dtype)


WIDE = (torch.float64, torch.complex128)


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Low precision is summed in float32, which its squares do not leave."""
    values = gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(values, norm_type, dtype=wide).double()


def _joint(norms: Sequence[Tensor], norm_type: float, nested: bool = False) -> Tensor:
    """The norm of what has these norms; that of order 0 is a count, of elements or, `nested`, of what has some."""
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    stacked = torch.stack(list(norms)).double()
    return stacked.sum() if norm_type == 0 and not nested else torch.linalg.vector_norm(stacked, norm_type)
