"""Numbers that are hard to round, and a comparison of bits."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from memgraph.kernels.cast import LaunchConfig

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
CONFIG = LaunchConfig(1024)  # under the interpreter all configs are alike
CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hard(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random bits: all exponents, denormals, infinities and NaNs; then ties, ends of ranges, zeros."""
    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).to(torch.int32)
    near = torch.randn(count, generator=generator).mul(10.0 ** torch.randint(-9, 7, (count,), generator=generator))
    x = torch.where(torch.arange(count) % 2 == 0, bits.view(torch.float32), near)
    odd = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4028234e38, -3.4e38, 3.39e38, 1e-45, -1e-40, 1.1754944e-38]
        + [65504.0, 65519.0, 65520.0, -65536.0, 6e-8, 2.9e-8, 3e-8, 6.1e-5, 448.0, 464.0, 465.0, 480.0, -500.0]
        + [1.00390625, 1.01171875, -1.00390625, 1.00048828125, 1.0625, 1.1875, 2**-9, 2**-10, 2**-10 * 1.001, 17.0]
    )
    x[: len(odd)] = odd[:count]
    return x.to(dtype).to(DEVICE)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if all bits are equal, except those of NaNs."""
    if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return False
    if not ours.dtype.is_floating_point:
        return torch.equal(ours, theirs)
    numbers = ~ours.float().isnan()
    codes = CODES[ours.itemsize]
    equal = ours.contiguous().view(codes) == theirs.contiguous().view(codes)
    return torch.equal(numbers, ~theirs.float().isnan()) and bool((equal | ~numbers).all())
