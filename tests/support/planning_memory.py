"""Measure how far a process's anonymous memory grows during planning; run as its own process.

    python -m tests.support.planning_memory FOLDER     ->    {"budget": 33554432, "there": 6299648, "grown": 13377536, ...}

Another step is planned before, so that imports and threads are not counted.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import resident_bytes

WIDTH, LAYERS, ROWS = 256, 8, 4096
BUDGET = 32 << 20  # half of what the step needs as it is; with some MB for Python, which no budget counts


def anonymous_nbytes() -> int:
    """Return the anonymous bytes of this process, which are not backed by a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def net(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())))


def loss(y: Tensor) -> Tensor:
    return y.square().mean()


class Watch(threading.Thread):
    """Polls the memory in a thread."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.0005):
            self.most = max(self.most, anonymous_nbytes())


def grown(budget: int, folder: str) -> dict[str, int]:
    """Return how far the memory grows while a step is planned under `budget`."""
    model, x = net(WIDTH, LAYERS), torch.randn(ROWS, WIDTH)
    there = resident_bytes([*model.parameters(), x])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    begin = anonymous_nbytes()
    watch = Watch()
    watch.start()
    plan = memgraph.plan(model, x, budget=budget, loss=loss, spill_dir=folder)
    watch.done.set()
    watch.join()
    assert plan.plan, "it fits as it is"
    return {"budget": budget, "there": there, "grown": watch.most - begin, "forecast": plan.peak}


def main(folder: str) -> None:
    warm, x = net(64, LAYERS), torch.randn(512, 64)
    memgraph.plan(warm, x, budget=1_500_000, loss=loss, spill_dir=folder)
    print(json.dumps(grown(BUDGET, folder)))


if __name__ == "__main__":
    main(sys.argv[1])
