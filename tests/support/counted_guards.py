"""A child process that trains a model whose guard fails, while the second meter counts every step.

python -m tests.support.counted_guards    # one line of JSON for each step
"""

from __future__ import annotations

import copy
import json

import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import resident_bytes
from tests.support.allocator_meter import Allocator


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        x = self.norm(x)
        if mask.any():
            x = x * 2
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def main() -> None:
    """Train six steps under 70 % of the peak without a plan; the fourth and the sixth take the other branch."""
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(512, 64)
    eager, none, some = copy.deepcopy(model), torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    # All ops are priced here, because the memory of planning must not be counted below.
    peaks = [memgraph.plan(model, x, mask, budget="1GB").peak for mask in (none, some)]
    budget = int(0.7 * peaks[0])
    compiled = memgraph.compile(model, budget, offload=None)
    allocator = Allocator()
    for step, mask in enumerate([none, none, none, some, some, none]):
        resident = resident_bytes([*model.parameters(), *model.buffers(), x, mask])
        before = allocator.now
        allocator.reset()
        torch.manual_seed(step)
        compiled(x, mask).backward()
        counted = resident + allocator.most - before
        torch.manual_seed(step)
        eager(x, mask).backward()
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        equal = all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]
        equal &= all(map(torch.equal, model.buffers(), eager.buffers()))
        failures = sum(each.failures for report in compiled.plans for each in report.assumptions)
        model.zero_grad()
        eager.zero_grad()
        line = {"counted": counted, "budget": budget, "equal": equal, "plans": len(compiled.plans)}
        print(json.dumps(line | {"failures": failures}))


if __name__ == "__main__":
    main()
