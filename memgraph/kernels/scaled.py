"""Numbers in one byte each, and one byte more for every GROUP of them: e4m3 codes beside a power of two.

    narrow_scaled([a, b], codes, scales)   ->  x / 2 ** (scale - 127), in e4m3; a group's largest is 224 to 448
    widen_scaled(codes, scales, [a, b])    ->  a and b again, each to about 6 % of itself or 1e-5 of its group's largest

A power of two scales without rounding, so that there is one rounding, to the nearest or by chance.  e4m3 has no
infinity: what is infinite comes back as no number.  A tensor's groups begin with it.  Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tensors.layout import flat
from .autotune import Way, launch, way_of
from .copy_runs import UNIT, lines
from .formats import FORMATS, narrowed, rounded, widened
from .random_bits import noise, noise_of

GROUP = 128  # numbers that share a scale: a part of UNIT, so that a line of the table begins with a whole group
WIDE = (torch.float32, torch.bfloat16, torch.float16)


def groups(tensors: Sequence[Tensor]) -> int:
    """The bytes that the scales of `tensors` take."""
    return sum(-(-x.numel() // GROUP) for x in tensors)


def narrow_scaled(tensors: Sequence[Tensor], codes: Tensor, scales: Tensor, seed: int | None = None) -> None:
    """Fill `codes`, a byte for each number, and `scales`, a byte for each group.

    Raises:
        ValueError: a tensor is no float, has gaps or overlaps, or there are other numbers of bytes.
    """
    _check(tensors, codes, scales)
    narrow_scaled_by(_way(tensors), tensors, codes, scales, seed)


def widen_scaled(codes: Tensor, scales: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fill `tensors` with what `narrow_scaled` made of such.

    Raises:
        ValueError: as `narrow_scaled`.
    """
    _check(tensors, codes, scales)
    widen_scaled_by(_way(tensors), codes, scales, tensors)


def narrow_scaled_by(
    way: Way | None, tensors: Sequence[Tensor], codes: Tensor, scales: Tensor, seed: int | None = None
) -> None:
    """`narrow_scaled`, in a way of the caller's choice."""
    if way is not None:
        return _launch(way, tensors, codes, scales, seed, True)
    for x, at, group in _places(tensors):
        wide = _grouped(flat(x).float())
        bits = wide.abs().where(wide.isfinite(), 0.0).amax(1).view(torch.int32)
        scale = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=1)
        unit = ((254 - scale) << 23).view(torch.float32)
        chance = None if seed is None else _grouped(noise_of(at, x.numel(), seed, x.device))
        code = rounded(wide * unit[:, None], torch.float8_e4m3fn, chance).view(torch.uint8)
        codes[at : at + x.numel()] = code.flatten()[: x.numel()]
        scales[group : group + len(scale)] = scale.to(torch.uint8)


def widen_scaled_by(way: Way | None, codes: Tensor, scales: Tensor, tensors: Sequence[Tensor]) -> None:
    """`widen_scaled`, in a way of the caller's choice."""
    if way is not None:
        return _launch(way, tensors, codes, scales, None, False)
    for x, at, group in _places(tensors):
        code = _grouped(codes[at : at + x.numel()]).view(torch.float8_e4m3fn)
        unit = (scales[group : group + len(code)].int() << 23).view(torch.float32)
        flat(x).copy_(rounded((code.float() * unit[:, None]).flatten()[: x.numel()], x.dtype))


def _check(tensors: Sequence[Tensor], codes: Tensor, scales: Tensor) -> None:
    wanted = sum(x.numel() for x in tensors), groups(tensors)
    if any(x.dtype not in WIDE for x in tensors):
        raise ValueError(f"{[str(x.dtype) for x in tensors]}: these can be scaled: {[*map(str, WIDE)]}")
    if (codes.shape, scales.shape) != ((wanted[0],), (wanted[1],)) or {codes.dtype, scales.dtype} != {torch.uint8}:
        raise ValueError(f"{wanted[0]} and {wanted[1]} bytes are wanted, not {codes.shape} and {scales.shape}")
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("bytes are wanted that lie one behind the other")


def _way(tensors: Sequence[Tensor]) -> Way | None:
    return way_of("move", tensors[0].device, sum(x.nbytes for x in tensors)) if tensors else None


def _places(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """Each tensor with its first code and its first scale."""
    at = accumulate((x.numel() for x in tensors), initial=0)
    group = accumulate((groups([x]) for x in tensors), initial=0)
    return [place for place in zip(tensors, at, group, strict=False) if place[0].numel()]


def _grouped(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % GROUP)).view(-1, GROUP)


def _launch(way: Way, tensors: Sequence[Tensor], codes: Tensor, scales: Tensor, seed: int | None, narrow: bool) -> None:
    """One launch for all tensors of one format."""
    for dtype in {x.dtype: None for x in tensors}:
        runs = [
            (x.numel(), x.data_ptr(), codes.data_ptr() + at, at, scales.data_ptr() + group)
            for x, at, group in _places(tensors)
            if x.dtype is dtype
        ]
        table = lines(runs, (UNIT * dtype.itemsize, UNIT, UNIT, UNIT // GROUP), codes.device)
        if len(table):
            launch(
                _kernel, way, len(table), codes.device, table, len(table), seed or 0, FORMAT=FORMATS[dtype].name,
                OF=FORMATS[dtype].carrier, NARROW=narrow, STOCHASTIC=seed is not None, GROUP=GROUP,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "seed"])
def _kernel(
    table, rows, seed,
    FORMAT: tl.constexpr, OF: tl.constexpr, NARROW: tl.constexpr, STOCHASTIC: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK // GROUP
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = table + row * 5
        count = tl.load(line).to(tl.int32)
        wide = tl.load(line + 1).to(tl.pointer_type(OF))  # pyright: ignore[reportArgumentType]
        codes = tl.load(line + 2).to(tl.pointer_type(tl.uint8))
        place = tl.load(line + 3)
        scales = tl.load(line + 4).to(tl.pointer_type(tl.uint8))
        for at in range(0, count, BLOCK):
            group = at // GROUP + tl.arange(0, ROWS)
            i = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            inside, some = i < count, group * GROUP < count
            if NARROW:
                x = widened(tl.load(wide + i, mask=inside, other=0), FORMAT)
                scale = _scale(x)
                unit = ((254 - scale) << 23).to(tl.float32, bitcast=True)
                chance = i
                if STOCHASTIC:
                    chance = noise(place + i, seed)
                tl.store(codes + i, narrowed(x * unit[:, None], chance, "e4m3", STOCHASTIC), mask=inside)
                tl.store(scales + group, scale.to(tl.uint8), mask=some)
            else:
                scale = tl.load(scales + group, mask=some, other=127).to(tl.int32)
                unit = (scale << 23).to(tl.float32, bitcast=True)
                x = widened(tl.load(codes + i, mask=inside, other=0), "e4m3") * unit[:, None]
                tl.store(wide + i, narrowed(x, i, FORMAT, False), mask=inside)


@triton.jit
def _scale(x):
    """Of each row, the exponent with which its largest finite number comes to lie between 224 and 448."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.where(bits < 0x7F800000, bits, 0), axis=1)
    return tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)
