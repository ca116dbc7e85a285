"""Cast a flat range of numbers in one pass: a bucket to the format in which it is sent, and back; a value for its way.

    cast(f32[1000], bf16[1000])   ->  filled, to the nearest, nothing made infinite
    copied(f32[8, 4], bf16)       ->  bf16[8, 4] with the same strides; nobody waits for it

It needs no table, so nothing is copied to the device.  Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tensors.layout import flat
from .autotune import Found, Trial, Way, launch, measured, way_of
from .copy_runs import check, move_twin
from .formats import FORMATS, narrowed, widened
from .random_bits import noise


def cast(of: Tensor, into: Tensor, seed: int | None = None) -> None:
    """Fill the flat `into` with `of` in its format; with a `seed`, rounded up or down by chance.

    Raises:
        ValueError: they are not flat, not of one length, or no formats that are cast.
    """
    check(of, into, seed)
    cast_by(way_of("cast", of.device, of.nbytes), of, into, seed)


def cast_by(way: Way | None, of: Tensor, into: Tensor, seed: int | None = None) -> None:
    """`cast`, in a way of the caller's choice."""
    if way is None or of.dtype is into.dtype:
        move_twin([(of, into)], seed)
    elif of.numel():
        source, target = FORMATS[of.dtype], FORMATS[into.dtype]
        launch(
            _kernel, way, -(-of.numel() // way.block), of.device, _codes(of), _codes(into), of.numel(), seed or 0,
            FROM=source.name, INTO=target.name, STOCHASTIC=seed is not None,
        )  # fmt: skip


def copied(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A copy of a dense tensor with the same strides; None where the twins, which are in `wire.py`, are faster."""
    way = way_of("cast", x.device, x.nbytes)
    if way is None:
        return None
    copy = torch.empty_like(x, dtype=dtype)
    cast_by(way, flat(x), flat(copy))
    return copy


def compared(device: torch.device) -> Found:
    """Find the fastest way to cast."""
    return measured("cast", device, _trial(device))


def _trial(device: torch.device) -> Trial:
    def trial(nbytes: int, way: Way | None) -> Callable[[], object]:
        wide = torch.zeros(nbytes // 4, device=device)
        return partial(cast_by, way, wide, torch.empty_like(wide, dtype=torch.bfloat16))

    return trial


def _codes(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[x.itemsize])


@triton.jit(do_not_specialize=["seed"])
def _kernel(
    of, into, count, seed,
    FROM: tl.constexpr, INTO: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    chance = i
    if STOCHASTIC:
        chance = noise(i, seed)
    tl.store(into + i, narrowed(widened(tl.load(of + i, mask=inside), FROM), chance, INTO, STOCHASTIC), mask=inside)
