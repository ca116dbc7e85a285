"""Clip the averaged gradient by its norm, each rank its pieces.

    each rank: norms of its pieces   ->   norm of each parameter   ->   norm of them all, the same on all ranks

The parts are put together as `torch.nn.utils.clip_grad_norm_` does, parameter by parameter, so that every kind of norm
is what it is there: to the bit, if each parameter's gradient is whole on some rank. That of one which is cut is summed
piece by piece, in float64, so that last bits may differ. Each call looks at the gradients that there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checkpoint.full_state import places
from .comm.model_parallel import ModelParallel
from .grad_presence import PARTS
from .held_gradients import VersionKey

if TYPE_CHECKING:
    from .held_gradients import HeldGradients
    from .optimizer import OSS

SMALL = 1e-6  # torch adds it to the norm


@dataclass(frozen=True)
class NormLimit:
    """What a norm is to be at most."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool

    @classmethod
    def of(cls, max_norm: object, norm_type: object, error_if_nonfinite: object) -> NormLimit:
        """
        Raises:
            TypeError: one of them is no number.
            ValueError: there is no such norm, or none is that small.
        """
        found = {"max_norm": max_norm, "norm_type": norm_type}
        numbers = {name: _number(name, value) for name, value in found.items()}
        if not numbers["max_norm"] >= 0:
            raise ValueError(f"max_norm={max_norm!r}; give a norm, 0 or larger")
        if math.isnan(numbers["norm_type"]):
            raise ValueError(f"norm_type={norm_type!r}; give the order of the norm, as 2.0, or math.inf")
        return cls(**numbers, error_if_nonfinite=bool(error_if_nonfinite))

    def __str__(self) -> str:
        return f"clip_grad_norm_({self.max_norm}, {self.norm_type}, error_if_nonfinite={self.error_if_nonfinite})"


def _number(name: str, value: Any) -> float:
    """A number, or its text, as torch takes "inf"."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # the last of a tensor with several elements
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name} is a {type(value).__name__}, {str(value)[:50]!r}; give a number") from error


def clip_grad_norm(
    optimizer: OSS, held: HeldGradients, limit: NormLimit, parallel: ModelParallel | None = None
) -> Tensor:
    """Scale the held gradients down to the limit, if their norm is larger; returns that.

    Args:
        parallel: the ranks that have the other parts of the same parameters.

    Raises:
        RuntimeError: it is not finite, and that was to be an error. Nothing is scaled.
    """
    total = _total(optimizer, held, limit.norm_type, parallel)
    if limit.error_if_nonfinite and not bool(total.isfinite()):
        found = f"the total norm of order {limit.norm_type} of the gradients is {total.item()}, so it can't be clipped"
        raise RuntimeError(f"{found}; with error_if_nonfinite=False it is returned instead")
    coefficient = limit.max_norm / (total + SMALL)
    # Gradients that are not numbers are left as they are: that the norm is none says so.
    if bool(coefficient < 1):
        held.scale(coefficient)
    return total


def _total(optimizer: OSS, held: HeldGradients, norm_type: float, parallel: ModelParallel | None) -> Tensor:
    parameters = optimizer.layout.parameters
    used = [item for item, kind in enumerate(held.kinds) if kind and parameters[item].numel()]
    norms = _norms(optimizer, held, norm_type, used)
    if parallel is not None:
        norms = [
            norms[i] if parallel.is_replicated(parameters[used[i]]) else _joint(list(every), norm_type)
            for i, every in enumerate(parallel.each(norms).T)
        ]
    wide = [parameters[item].dtype in WIDE for item in used]
    dtype = torch.float64 if any(wide) else torch.float32
    rounded = [norm if is_wide else norm.float() for norm, is_wide in zip(norms, wide, strict=True)]
    total = torch.linalg.vector_norm(torch.stack([norm.to(dtype) for norm in rounded]), norm_type) if used else 0.0
    return torch.as_tensor(total, dtype=dtype, device=optimizer.layout.device)


def _norms(optimizer: OSS, held: HeldGradients, norm_type: float, used: Sequence[int]) -> list[Tensor]:
    """The norm of each of these parameters' gradients, in float64."""
    exchange, parameters, pieces = optimizer.comm, optimizer.layout.parameters, places(optimizer)
    found: dict[int, list[Tensor]] = {item: [] for item in used}
    are_whole = isinstance(held, VersionKey) and PARTS not in held.kinds
    if are_whole:  # and the owner of the first piece tells the norm
        owned = [item for item in used if pieces[item][0].rank == exchange.rank]
        found |= {item: [_norm(grad, norm_type)] for item in owned if (grad := parameters[item].grad) is not None}
    else:
        for item, gradient in held.own():
            if gradient.numel():
                found[item].append(_norm(gradient, norm_type))
    identity = math.inf if norm_type < 0 else 0.0
    mine = [float(_joint(parts, norm_type)) if parts else identity for parts in found.values()]
    every = exchange.each(exchange.numbers(mine, torch.float64, optimizer.layout.device))
    return [
        every[pieces[item][0].rank, i] if are_whole or len(pieces[item]) == 1 else _joint(list(every[:, i]), norm_type)
        for i, item in enumerate(used)
    ]


WIDE = (torch.float64, torch.complex128)


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Low precision is summed in float32, which its squares do not leave."""
    values = gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(values, norm_type, dtype=wide).double()


def _joint(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of what has these norms; that of order 0 is a count."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(list(norms)).double()
    return stacked.sum() if norm_type == 0 else torch.linalg.vector_norm(stacked, norm_type)
