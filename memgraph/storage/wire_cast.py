"""Cast a value for its copy to a tier and back: to bfloat16, which has the range of float32.

    narrow(f32[1024, 1024])   ->  bf16[1024, 1024], half the bytes, rounded as x.to(torch.bfloat16) rounds
    widen(bf16[1024, 1024])   ->  f32[1024, 1024]

The last 0.2 % of float32's range would round to infinity: it becomes the largest bfloat16 number instead. Infinities
and NaN stay what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from passes.ir.machine import CAST_WORKSPACE

from ..tensors.layout import flat

LARGEST = torch.finfo(torch.bfloat16).max
CHUNK = CAST_WORKSPACE // 2  # elements that are compared at a time; each takes a byte for a mask


def wire_name(dtype: torch.dtype | None) -> str:
    """Return the name of a wire type in a trace; empty for no cast.

    Raises:
        ValueError: values can't be cast to it.
    """
    if dtype is None:
        return ""
    if dtype is torch.bfloat16:
        return "bf16"
    why = "its largest number is 65504, and larger ones would be lost; " if dtype is torch.float16 else ""
    raise ValueError(f"wire_dtype={dtype}: {why}give torch.bfloat16, which has float32's range, or None for no cast")


def narrow(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Copy a float32 tensor to bfloat16 with the same strides, or to float16 if the caller checked `fits_dtype`."""
    if dtype is torch.float16:
        return torch.empty_like(x, dtype=dtype).copy_(x)
    if x.is_cuda and (cast := _cast_by_kernel(x, torch.bfloat16)) is not None:
        return cast
    cast = torch.empty_like(x, dtype=torch.bfloat16).copy_(x)
    if x.numel() and not _is_within_range(x):
        _clamp_new_infinities(x, cast)
    return cast


def fits_dtype(x: Tensor, dtype: torch.dtype) -> bool:
    """Return True if no finite number would become infinite."""
    if dtype is torch.bfloat16:
        return True
    return not bool((x.to(dtype).isinf() & x.isfinite()).any())


def widen(x: Tensor) -> Tensor:
    """Copy a bfloat16 tensor to float32 with the same strides."""
    if x.is_cuda and (cast := _cast_by_kernel(x, torch.float32)) is not None:
        return cast
    return torch.empty_like(x, dtype=torch.float32).copy_(x)


def _cast_by_kernel(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    from ..kernels.cast import (
        cast_copy,  # here, because Triton takes half a second to import and a CPU does not need it
    )

    return cast_copy(x, dtype)


def _is_within_range(x: Tensor) -> bool:
    # One pass that allocates nothing; on a GPU it waits for the answer.
    least, most = torch.aminmax(flat(x))
    return bool((least >= -LARGEST) & (most <= LARGEST))


def _clamp_new_infinities(x: Tensor, cast: Tensor) -> None:
    """Let only those numbers of `cast` be infinite that were."""
    for wide, thin in zip(flat(x).split(CHUNK), flat(cast).split(CHUNK), strict=True):
        thin.clamp_(-LARGEST, LARGEST)
        for infinite in (torch.inf, -torch.inf):
            thin.masked_fill_(wide == infinite, infinite)
