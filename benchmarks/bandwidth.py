"""Measure the bandwidth of the kernels, and of a plain copy on the device.

    rows(cuda)  ->  Figure("copy", 4200.0, "GB/s", 1.0), Figure("cast to bf16", 3900.0, "GB/s", 0.93), ...

The goal is 85 % of the copy. On a CPU the fallbacks run, which shows only that this program works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import torch

from benchmarks.beside import Figure
from benchmarks.laps import Laps
from memgraph.kernels.cast import best_config, tune_cast
from memgraph.storage.wire_cast import narrow, widen

TIMES = 10
Case = tuple[Callable[[], object], int]  # one run, and the bytes that it reads and writes


def rows(device: torch.device, nbytes: int = 512 << 20, laps: int = 20) -> Iterator[Figure]:
    """Measure every kernel on `nbytes` of float32, after it is autotuned."""
    tune_cast(device, narrow)
    config = best_config("cast", device, nbytes)
    name = f"cast: {config.block} numbers, {config.warps} warps" if config else "cast: the fallback"
    yield Figure(name, float(config.block if config else 0), "chosen")
    wide = torch.randn(nbytes // 4, device=device)
    like, thin = torch.empty_like(wide), torch.empty_like(wide, dtype=torch.bfloat16)
    cases: dict[str, Case] = {
        "copy": (lambda: like.copy_(wide), 8 * len(wide)),
        "cast to bf16": (lambda: narrow(wide), 6 * len(wide)),
        "cast to f32": (lambda: widen(thin), 6 * len(wide)),
    }
    copy = 0.0
    for name, case in cases.items():
        rate = _rate(device, *case, laps)
        copy = copy or rate  # of the first case
        yield Figure(name, rate, "GB/s", rate / copy)


def _rate(device: torch.device, run: Callable[[], object], nbytes: int, laps: int) -> float:
    """Return the median of `laps` laps; a lap queues several runs, so that launches are hidden."""

    def lap() -> None:
        for _ in range(TIMES):
            run()

    lap()
    return TIMES * nbytes / 1e6 / median(Laps(device).ms(lap) for _ in range(laps))
