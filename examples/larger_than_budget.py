"""Train a model whose parameters, gradients and optimizer states are larger than the budget.

    python examples/larger_than_budget.py

What does not fit is kept on disk, and comes to the device when the step reads it. Behind a GPU it is kept in pinned
host memory instead.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import memgraph

WIDTH, LAYERS, BATCH = 1024, 8, 16
BUDGET = 60_000_000

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
parameters = sum(p.numel() for p in model.parameters())
print(f"{parameters / 1e6:.1f}M parameters take {16 * parameters / 1e6:.0f} MB with gradients and Adam's states")

with tempfile.TemporaryDirectory() as folder:
    compiled = memgraph.compile(model, BUDGET, optimizer=optimizer, spill_dir=folder, time_limit=5)
    for _ in range(4):
        loss = compiled(torch.randn(BATCH, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
    print(compiled.plan)

    # The state is written without coming to the device as a whole, and training goes on from it bit for bit.
    checkpoint = Path(folder) / "run.pt"
    memgraph.save_state(checkpoint, compiled, optimizer)
    memgraph.load_state(checkpoint, compiled, optimizer)
    print(f"saved and loaded {checkpoint.stat().st_size / 1e6:.0f} MB")
