"""A child process that trains a model with opaque parts under a budget, while the second meter counts every step.

    python -m tests.support.counted_parts 0.6 --optimizer    # one line of JSON for each step

Its forward needs more memory from step to step, so some steps are reverted and planned again.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.allocator_meter import Allocator
from tests.support.counted_steps import after_planning, counted
from tests.support.zoo import Batch, Case

WIDTH, ROWS, LAYERS = 64, 512, 4


class Drawn(nn.Module):
    """A layer that reads a value with numpy, draws random numbers, and writes to a buffer."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.linear, self.steps, self.calls = nn.Linear(WIDTH, WIDTH), steps, 0
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        positive = int(float(x.detach().numpy()[0, 0]) > 0)
        self.calls += 1
        for _ in range(self.steps + positive + self.calls // 2):
            x = F.dropout(torch.tanh(self.linear(x)), 0.1, self.training)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x + self.mean


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Drawn(1 + i % 2) for i in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for part, norm, wide in zip(self.parts, self.norms, self.wide, strict=True):
            x = x + part(norm(x))
            x = x + wide(x)
        return x


CASE = Case("parts", Layered, lambda: Batch((torch.randn(ROWS, WIDTH),)), lambda y: y.square().mean())


def main() -> None:
    """Train under a share of eager's activations."""
    parser = argparse.ArgumentParser()
    parser.add_argument("share", type=float)
    parser.add_argument("--optimizer", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    allocator = Allocator()
    after_planning(allocator.reset)
    for row in counted(CASE, given.share, allocator, 2.0, given.optimizer):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
