"""Measure copies to pinned memory, alone and during compute, and how much they slow compute down.

    rows(cuda)  ->  [Figure("copy out", 53.1, "GB/s"), Figure("copy out beside compute", 52.0, "GB/s", 0.979), ...]

The goal is 90 % of the link's own rate during compute, and compute that is slower by at most 3 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from memgraph.storage.pinned_pool import CudaPinnedAllocator, PinnedBlock
from memgraph.storage.pinned_tier import copy_streams

LAPS = 5


@dataclass(frozen=True)
class Figure:
    """A measured value, and its ratio to a reference."""

    name: str
    value: float
    unit: str
    share: float | None = None


@dataclass(frozen=True)
class Load:
    """The bytes of a copy, copies in a lap, and the width and number of the concurrent matrix products."""

    nbytes: int = 256 << 20
    copies: int = 8
    width: int = 8192
    products: int = 40


USUAL = Load()


def rows(device: torch.device, load: Load = USUAL) -> list[Figure]:
    """Measure both directions; empty on a CPU, which has no streams."""
    if device.type != "cuda":
        return []
    block = PinnedBlock(load.nbytes, device, CudaPinnedAllocator())
    there = torch.empty(load.nbytes, dtype=torch.uint8, device=device)
    a, b = (torch.randn(load.width, load.width, dtype=torch.bfloat16, device=device) for _ in range(2))
    into = torch.empty_like(a)
    compute = partial(_products, a, b, into, load.products)
    found = [figure for way, stream in zip(("out", "back"), copy_streams(torch.cuda, device), strict=True)
             for figure in _direction(way, stream, block.bytes, there, compute, load)]  # fmt: skip
    block.close()
    return found


def _direction(
    way: str, stream: torch.cuda.Stream, host: Tensor, there: Tensor, compute: Callable[[], None], load: Load
) -> list[Figure]:
    copy = partial((host if way == "out" else there).copy_, there if way == "out" else host, non_blocking=True)
    compute()
    alone = median(_both(stream, copy, load.copies, None)[0] for _ in range(LAPS))
    computing = median(_both(stream, copy, 0, compute)[1] for _ in range(LAPS))
    # To time copies, compute must outlast them; to time compute, the copies must outlast it.
    fewer, more = int(0.9 * computing / alone) or 1, int(1.5 * computing / alone) + 1
    copied = median(_both(stream, copy, fewer, compute)[0] for _ in range(LAPS))
    slowed = median(_both(stream, copy, more, compute)[1] for _ in range(LAPS))
    return [
        Figure(f"copy {way}", load.nbytes / 1e6 / alone, "GB/s"),
        Figure(f"copy {way} beside compute", load.nbytes / 1e6 / copied, "GB/s", alone / copied),
        Figure(f"compute beside copies {way}", slowed, "ms", slowed / computing),
    ]


def _both(
    stream: torch.cuda.Stream, copy: Callable[[], object], copies: int, compute: Callable[[], None] | None
) -> tuple[float, float]:
    """Return the milliseconds of one of `copies` on the stream, and of concurrent compute."""
    copying, computing = ([torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        copying[0].record()
        for _ in range(copies):
            copy()
        copying[1].record()
    computing[0].record()
    if compute is not None:
        compute()
    computing[1].record()
    torch.cuda.synchronize()
    return copying[0].elapsed_time(copying[1]) / max(copies, 1), computing[0].elapsed_time(computing[1])


def _products(a: Tensor, b: Tensor, into: Tensor, count: int) -> None:
    for _ in range(count):
        torch.mm(a, b, out=into)
