"""Random bits that depend on a seed and a place alone, so that whoever rounds in whatever blocks rounds alike.

noise(place 7, seed 3)  ->  32 bits
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SEEDS = 1 << 31


@triton.jit
def noise(place, seed):
    """32 bits for each 64-bit `place`."""
    low = (place & 0xFFFFFFFF).to(tl.uint32)
    high = (place >> 32).to(tl.uint32)
    return _mixed(_mixed(low ^ _mixed(seed.to(tl.uint32))) ^ high)


@triton.jit
def _mixed(x):
    """A permutation of 32 bits in which each bit of `x` flips about half of them."""
    x ^= x >> 17
    x *= 0xED5AD4BB
    x ^= x >> 11
    x *= 0xAC4C1B51
    x ^= x >> 15
    x *= 0x31848BAB
    x ^= x >> 14
    return x


def noise_of(first: int, count: int, seed: int, device: torch.device) -> Tensor:
    """The twin: the bits of `count` places from `first` on, as int64."""
    place = torch.arange(first, first + count, device=device)
    key = _mixed_twin(torch.tensor(seed, device=device))
    return _mixed_twin(_mixed_twin((place & 0xFFFFFFFF) ^ key) ^ (place >> 32))


def _mixed_twin(x: Tensor) -> Tensor:
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 14)
