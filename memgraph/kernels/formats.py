"""Floats as integers: each format's numbers rounded the same to the bit on every machine, and never to infinity.

    1.00390625 (f32)  ->  0x3F80 (bf16), the nearest; of two equally near ones the even
    3.4028e38  (f32)  ->  0x7F7F (bf16), the largest: what is finite stays finite
    1.001      (f32)  ->  0x3F80 or 0x3F81, the nearer the likelier, where `noise` is given

Triton's interpreter cuts bfloat16 off where hardware rounds it; integers are the same on both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """`digits` behind the point, the exponent of the `least` number that has all of them, and some codes."""

    name: str
    carrier: tl.dtype  # the integers that hold the codes
    digits: int
    least: int
    most: int  # the code of the largest finite number
    infinite: int
    odd: int  # a code that is no number


FORMATS = {
    torch.float32: Format("f32", tl.uint32, 23, -126, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    torch.bfloat16: Format("bf16", tl.uint16, 7, -126, 0x7F7F, 0x7F80, 0x7FC0),
    torch.float16: Format("f16", tl.uint16, 10, -14, 0x7BFF, 0x7C00, 0x7E00),
    torch.float8_e4m3fn: Format("e4m3", tl.uint8, 3, -6, 0x7E, 0x7F, 0x7F),  # it has no infinity
}


@triton.jit
def widened(code, FORMAT: tl.constexpr):
    """The float32 numbers that codes stand for, exactly."""
    if FORMAT == "f32":
        return code.to(tl.float32, bitcast=True)
    elif FORMAT == "bf16":
        return (code.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == "f16":
        return code.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.uint32)
        sign, size = wide >> 7, wide & 0x7F
        small = (size.to(tl.float32) * 0.001953125).to(tl.uint32, bitcast=True)  # steps of 2 ** -9
        bits = tl.where(size < 8, small, (size << 20) + (120 << 23))
        bits = tl.where(size == 0x7F, 0x7FC00000, bits)
        return (bits | (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def narrowed(x, noise, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The codes of float32 numbers; `noise` is 32 random bits for each, if that is how they are rounded."""
    bits = x.to(tl.uint32, bitcast=True)
    if FORMAT == "f32":
        return bits
    elif FORMAT == "bf16":
        return _code(bits, noise, 7, -126, 0x7F7F, 0x7F80, 0x7FC0, 15, STOCHASTIC).to(tl.uint16)
    elif FORMAT == "f16":
        return _code(bits, noise, 10, -14, 0x7BFF, 0x7C00, 0x7E00, 15, STOCHASTIC).to(tl.uint16)
    else:
        return _code(bits, noise, 3, -6, 0x7E, 0x7F, 0x7F, 7, STOCHASTIC).to(tl.uint8)


@triton.jit
def _code(
    bits, noise,
    DIGITS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, INFINITE: tl.constexpr, ODD: tl.constexpr,
    SIGN: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    size = bits & 0x7FFFFFFF
    if LEAST == -126:  # the exponents of float32: small numbers lose as many digits as the others
        base, whole, cut = bits * 0, size, bits * 0 + (23 - DIGITS)
    else:
        field = tl.maximum((size >> 23).to(tl.int32), 1)
        whole = tl.where(size >> 23 > 0, (size & 0x7FFFFF) | 0x800000, size)
        below = tl.maximum(LEAST + 127 - field, 0)  # so many digits more are cut off
        base = (tl.maximum(field - (LEAST + 127), 0) << DIGITS).to(tl.uint32)
        cut = (23 - DIGITS + below).to(tl.uint32)
        whole = whole >> tl.minimum(tl.maximum(cut, 31) - 31, 31)
        cut = tl.minimum(cut, 31)
    one = bits * 0 + 1
    if STOCHASTIC:
        up = noise & ((one << cut) - 1)
    else:
        up = (one << (cut - 1)) - 1 + ((whole >> cut) & 1)
    code = tl.minimum(base + ((whole + up) >> cut), MOST)
    code = tl.where(size == 0x7F800000, INFINITE, tl.where(size > 0x7F800000, ODD, code))
    return code | ((bits >> 31) << SIGN)


def rounded(x: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> Tensor:
    """The twin of both: `x` in another format."""
    if dtype is torch.float32 or x.dtype is dtype:
        return x.to(dtype)
    x, most = x.to(torch.float32), torch.finfo(dtype).max
    near = x.nan_to_num(0.0, 0.0, 0.0) if noise is None else _jittered(x, FORMATS[dtype], noise)
    return torch.where(x.isfinite(), near.clamp(-most, most).to(torch.float32), _odd(x, dtype)).to(dtype)


def _odd(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if dtype is not torch.float8_e4m3fn else torch.full_like(x, torch.nan).copysign(x)


def _jittered(x: Tensor, format: Format, noise: Tensor) -> Tensor:
    """Numbers of the format, as float64: the one below each, or the one above; 0 for what is not finite."""
    finite = torch.where(x.isfinite(), x, 0.0).double()
    exponent = (torch.frexp(finite).exponent - 1).clamp(min=format.least).double()
    step = torch.exp2(exponent - format.digits)
    # How many bits are cut off: those of float32 that weigh less than a step, 31 at most.
    last = (torch.frexp(finite).exponent - 1).clamp(min=-126) - 23
    last = torch.where(finite == 0, -149, last)
    cut = (exponent - format.digits - last).clamp(max=31).long()
    part = (finite.abs() / step * torch.exp2(cut.double())).floor().long()
    size = ((part + (noise & ((1 << cut) - 1))) >> cut).double() * step
    return size.copysign(finite)
