"""How fast copies to pinned memory go, alone and beside compute, and what compute loses by them.

    rows(cuda)  ->  [Figure("copy out", 53.1, "GB/s"), Figure("copy out beside compute", 52.0, "GB/s", 0.979), ...]

The goal is 90 % of the link's own rate while compute runs, and compute slowed by no more than 3 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.laps import Laps
from memgraph.pinned import streams
from memgraph.slab import CudaPins, Slab

LAPS = 5


@dataclass(frozen=True)
class Figure:
    """Something that was measured, and its share of what it is to be compared with."""

    name: str
    value: float
    unit: str
    share: float | None = None


@dataclass(frozen=True)
class Load:
    """Bytes of a copy, copies in a lap, and the width and number of the matrix products beside them."""

    nbytes: int = 256 << 20
    copies: int = 8
    width: int = 8192
    products: int = 40


def rows(device: torch.device, load: Load = Load()) -> list[Figure]:
    """Both directions; there is none on a CPU, where nothing runs beside anything."""
    if device.type != "cuda":
        return []
    slab = Slab(load.nbytes, device, CudaPins())
    there = torch.empty(load.nbytes, dtype=torch.uint8, device=device)
    a, b = (torch.randn(load.width, load.width, dtype=torch.bfloat16, device=device) for _ in range(2))
    into = torch.empty_like(a)
    compute = partial(_products, a, b, into, load.products)
    found = [figure for way, stream in zip(("out", "back"), streams(torch.cuda, device), strict=True)
             for figure in _direction(way, stream, slab.bytes, there, compute, load)]  # fmt: skip
    slab.close()
    return found


def _direction(
    way: str, stream: torch.cuda.Stream, host: Tensor, there: Tensor, compute: Callable[[], None], load: Load
) -> list[Figure]:
    into, of = (host, there) if way == "out" else (there, host)
    laps = Laps(there.device)
    alone = median(_copying(stream, into, of, load.copies) for _ in range(LAPS))
    computing = median(laps.ms(compute) for _ in range(LAPS))
    both = []
    for _ in range(LAPS):
        # As many copies as compute has time for, and some more: it is never without one beside it.
        copies = max(load.copies, int(1.5 * load.copies * computing / alone))
        with torch.cuda.stream(stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(copies):
                into.copy_(of, non_blocking=True)
            end.record()
        beside = laps.ms(compute)
        end.synchronize()
        both.append((begin.elapsed_time(end) / copies * load.copies, beside))
    copied, slowed = (median(values) for values in zip(*both, strict=True))
    rate = load.nbytes * load.copies / 1e6
    return [
        Figure(f"copy {way}", rate / alone, "GB/s"),
        Figure(f"copy {way} beside compute", rate / copied, "GB/s", alone / copied),
        Figure(f"compute beside copies {way}", slowed, "ms", slowed / computing),
    ]


def _copying(stream: torch.cuda.Stream, into: Tensor, of: Tensor, copies: int) -> float:
    """Milliseconds of copies, alone."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(copies):
            into.copy_(of, non_blocking=True)
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _products(a: Tensor, b: Tensor, into: Tensor, count: int) -> None:
    for _ in range(count):
        torch.mm(a, b, out=into)
