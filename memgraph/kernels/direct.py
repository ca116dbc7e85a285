"""Pack straight into pinned host memory: a kernel writes over the link, and nothing is staged on the device.

    pack_pinned([a, b], slab[:9])   ->  slab holds a and b in its own format, once the stream has come so far

Only few programs write: 32 fill a link, and more would hold up what computes beside them, many times over.  The copy
engine holds up nothing, so that this is for what it is bad at: many small tensors, and casts that halve the bytes.
Nothing in a step uses it yet.  Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .autotune import Found, Trial, Way, measured, way_of
from .copy_runs import Pair, check, move_by
from .pack import PIECE, parts

PROGRAMS = 32


def pack_pinned(tensors: Sequence[Tensor], slab: Tensor, seed: int | None = None, programs: int = PROGRAMS) -> None:
    """Fill the flat `slab`, which is pinned, on the current stream.

    Raises:
        ValueError: `slab` is not pinned, or as `pack`.
    """
    if any(x.is_cuda for x in tensors) and not slab.is_pinned():
        raise ValueError("a GPU can write to pinned memory only: give a part of a slab, or of a pinned tensor")
    pairs = parts(tensors, slab)
    for of, into in pairs:
        check(of, into, seed)
    if pairs:
        way = way_of("pinned", pairs[0][0].device, sum(of.nbytes for of, _ in pairs))
        pack_pinned_by(way, pairs, seed, programs)


def pack_pinned_by(way: Way | None, pairs: Sequence[Pair], seed: int | None = None, programs: int = PROGRAMS) -> None:
    """`pack_pinned`, in a way of the caller's choice; the twin is a copy by the engine for each tensor."""
    move_by(way and replace(way, programs=programs), pairs, seed)


def compared(device: torch.device) -> Found:
    """Find the fastest way over the link, alone; what each takes of compute beside it is not asked."""
    return measured("pinned", device, _trial(device))


def _trial(device: torch.device) -> Trial:
    def trial(nbytes: int, way: Way | None) -> Callable[[], object]:
        tensors = [torch.zeros(PIECE // 4, device=device) for _ in range(nbytes // PIECE)]
        slab = torch.empty(len(tensors) * PIECE // 4, dtype=torch.bfloat16, pin_memory=True)
        return partial(pack_pinned_by, way, parts(tensors, slab))

    return trial
