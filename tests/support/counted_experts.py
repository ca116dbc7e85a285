"""A child process that trains experts as opaque parts, while the second meter counts every step.

    python -m tests.support.counted_experts    # one line of JSON for each step: bytes, forecast and budget

Each batch has as many rows, but goes to the experts in other shares, from even ones to a single expert for all.
"""

from __future__ import annotations

import gc
import json
import warnings

import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import resident_bytes
from tests.support.allocator_meter import Allocator
from tests.support.counted_steps import after_planning

WIDTH, ROWS, EXPERTS, STEPS, BUDGET = 32, 96, 4, 64, 560_000


class Experts(nn.Module):
    """Each row goes to two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            place, row = torch.where(mask[i])
            out.index_add_(0, row, expert(x[row]) * weights[row, place, None])
        return out


class Net(nn.Module):
    """Two layers of experts behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.parts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu() + x
        for part in self.parts:
            x = part(x).relu()
        return x.square().mean()


def main() -> None:
    """Train under a budget that the memory of the experts decides."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    allocator = Allocator()
    after_planning(allocator.reset)
    torch.manual_seed(0)
    model = Net()
    batches = [torch.randn(ROWS, WIDTH) + (step % 7) * torch.randn(WIDTH) for step in range(STEPS)]
    gc.collect()
    elsewhere = allocator.now - resident_bytes([*model.parameters(), batches[0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    compiled = memgraph.compile(model, BUDGET, opaque=["parts.0", "parts.1"], time_limit=0.5)
    for x in batches:
        gc.collect()
        allocator.reset()
        compiled(x).backward()
        row = {"counted": allocator.most - elsewhere, "forecast": compiled.plan.peak, "budget": BUDGET}
        print(json.dumps(row), flush=True)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
