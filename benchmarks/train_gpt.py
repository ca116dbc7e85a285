"""Train a byte-level GPT on several ranks, each with its shard of AdamW's state.

    torchrun --nproc-per-node 2 -m benchmarks.train_gpt

Each rank trains on its own passages; `step()` averages the gradients. A checkpoint is written every few steps; the same
command resumes from the last one, also on another number of ranks.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import typer

import memgraph
from benchmarks.gpt import GPT, Shape, batch, text


def main(
    steps: int = 20, every: int = 10, folder: Path = Path("gpt"), layers: int = 4, width: int = 256, size: int = 4
) -> None:
    """Train for so many steps, with `size` passages on each rank."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same parameters everywhere
    shape = Shape(layers=layers, width=width)
    model = GPT(shape).to(device)
    optimizer = memgraph.OSS(model.parameters(), torch.optim.AdamW, lr=3e-4)
    torch.manual_seed(1 + rank)  # dropout of its own on each

    done = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    if done:
        memgraph.load_sharded(folder / str(done), model, optimizer)
    passages = text()
    for step in range(done, steps):
        now, then = batch(passages, step * ranks + rank, size, shape.context)
        loss = model(now.to(device), then.to(device))
        loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item() / ranks:.4f}  norm {norm.item():.3f}", flush=True)
        if (step + 1) % every == 0 or step + 1 == steps:
            folder.mkdir(exist_ok=True)
            memgraph.save_sharded(folder / str(step + 1), model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
