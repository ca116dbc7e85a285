"""Shard optimizer states over ranks, each under its own budget.

    torchrun --nproc-per-node 2 examples/two_ranks.py

Each rank holds and updates 1/N of the optimizer states. Gradients are averaged inside the compiled backward, so no
DistributedDataParallel is needed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import memgraph

BUDGET = 6_500_000

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # the same parameters on all ranks
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
optimizer = memgraph.OSS(model.parameters(), torch.optim.AdamW, lr=1e-3)
compiled = memgraph.compile(model, BUDGET, optimizer=optimizer, time_limit=5)

torch.manual_seed(1 + rank)  # other data on each rank
for step in range(4):
    loss = compiled(torch.randn(64, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank}, step {step}: loss {loss.item():.6f}", flush=True)

if rank == 0:
    print(compiled.plan, flush=True)
dist.destroy_process_group()
