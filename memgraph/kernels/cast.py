"""Cast dense tensors between float32 and bfloat16 in one pass on a GPU.

    cast_copy(f32[8, 4], bf16)   ->  bf16[8, 4] with the same strides, rounded to the nearest, nothing made infinite
    cast_copy(bf16[8, 4], f32)   ->  f32[8, 4], exactly

Numbers are rounded in integers, so the bits equal those of `storage/wire_cast.py` on every machine. Unlike it, the
kernel never waits for the device to report whether a range overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tensors.layout import flat
from .autotune import ConfigTable, LaunchConfig, best_config, launch, tune

CODES = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16}  # the integers that hold the bits


def cast_copy(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return a copy of a dense tensor with the same strides, or None where the kernel was not measured to be faster.

    Raises:
        ValueError: `x` has gaps or overlaps.
    """
    config = best_config("cast", x.device, x.nbytes)
    return None if config is None else cast_by(config, x, dtype)


def cast_by(config: LaunchConfig, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast by the kernel in a shape of the caller's choice."""
    copy = torch.empty_like(x, dtype=dtype)
    if count := x.numel():
        codes, copied = flat(x).view(CODES[x.dtype]), flat(copy).view(CODES[dtype])
        launch(_kernel, config, -(-count // config.block), x.device, codes, copied, count, WIDEN=dtype is torch.float32)
    return copy


def tune_cast(device: torch.device, fallback: Callable[[Tensor], Tensor], room: int | None = None) -> ConfigTable:
    """Find what casts float32 to bfloat16 fastest, in `room` bytes: `fallback` or one of the kernel's shapes."""

    def trial(nbytes: int, config: LaunchConfig | None) -> Callable[[], object]:
        x = torch.zeros(nbytes // 4, device=device)
        return partial(fallback, x) if config is None else partial(cast_by, config, x, torch.bfloat16)

    return tune("cast", device, trial, room)


@triton.jit
def _kernel(codes, copied, count, WIDEN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    bits = tl.load(codes + i, mask=inside)
    if WIDEN:
        tl.store(copied + i, bits.to(tl.uint32) << 16, mask=inside)
    else:
        size = bits & 0x7FFFFFFF
        # To the nearest, of two equally near numbers to the even one; at most the largest finite number.
        nearest = tl.minimum((size + 0x7FFF + ((size >> 16) & 1)) >> 16, 0x7F7F)
        code = tl.where(size == 0x7F800000, 0x7F80, tl.where(size > 0x7F800000, 0x7FC0, nearest))
        tl.store(copied + i, (code | ((bits >> 31) << 15)).to(tl.uint16), mask=inside)
