"""Many tensors to one staging buffer and back; fragments of one tensor to another and back.

    pack([a, b], staging)                      ->  staging: a's numbers, then b's, in staging's format
    unpack(staging, [a, b])                    ->  a and b again, in their own
    gather(x, [(10, 3), (50, 2)], into)        ->  into: x[10:13], then x[50:52]
    scatter(of, [(10, 3), (50, 2)], x)         ->  x[10:13] and x[50:52] are what `of` held

A tensor's numbers come as they lie in memory.  All is one launch of `move.py`, or one copy a piece.
Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..tensors.layout import flat
from .autotune import Found, Trial, Way, measured
from .copy_runs import Pair, move, move_by

Run = tuple[int, int]  # first, count
PIECE = 16 << 10  # bytes of one of the many tensors by which the ways are compared


def pack(tensors: Sequence[Tensor], staging: Tensor, seed: int | None = None) -> None:
    """Fill the flat `staging` with `tensors`.

    Raises:
        ValueError: a tensor has gaps or overlaps, or they have other numbers of elements than `staging`.
    """
    move(parts(tensors, staging), seed)


def unpack(staging: Tensor, tensors: Sequence[Tensor], seed: int | None = None) -> None:
    """Fill `tensors` with what `pack` made of such.

    Raises:
        ValueError: as `pack`.
    """
    move([(of, into) for into, of in parts(tensors, staging)], seed)


def gather(of: Tensor, runs: Sequence[Run], into: Tensor, seed: int | None = None) -> None:
    """Fill the flat `into` with runs of elements of the flat `of`."""
    move(parts([of[first : first + count] for first, count in runs], into), seed)


def scatter(of: Tensor, runs: Sequence[Run], into: Tensor, seed: int | None = None) -> None:
    """Fill runs of elements of the flat `into`, which must not meet, with the flat `of`."""
    move([(x, piece) for piece, x in parts([into[first : first + count] for first, count in runs], of)], seed)


def parts(pieces: Sequence[Tensor], whole: Tensor) -> list[Pair]:
    """Each piece, flat, with its part of the flat `whole`."""
    counts = [x.numel() for x in pieces]
    if whole.dim() != 1 or whole.numel() != sum(counts):
        raise ValueError(f"a flat tensor of {sum(counts)} elements is wanted, not one of shape {tuple(whole.shape)}")
    return list(zip(map(flat, pieces), whole.split(counts), strict=True))


def compared(device: torch.device) -> Found:
    """Find the fastest way to pack, which is taken for the fastest to do any of these."""
    return measured("move", device, _trial(device))


def _trial(device: torch.device) -> Trial:
    def trial(nbytes: int, way: Way | None) -> Callable[[], object]:
        tensors = [torch.zeros(PIECE // 4, device=device) for _ in range(nbytes // PIECE)]
        staging = torch.empty(len(tensors) * PIECE // 4, dtype=torch.bfloat16, device=device)
        return partial(move_by, way, parts(tensors, staging))

    return trial
