"""Run a step under a hard memory limit: eager runs out of memory, and memgraph finishes.

    python -m benchmarks.limit [--layers 8] [--batch 16] [--share 0.4]

Both children build the same GPT and limit their private memory by RLIMIT_DATA. The limit is the memory that they have,
what the budget leaves above the parameters, and a slack for the captured graph, generated code and stacks.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

import memgraph
from benchmarks.gpt import GPT, Shape, batch, text
from memgraph.system.device import return_freed_memory

SLACK_NBYTES = 192 << 20


def main(layers: int = 8, size: Annotated[int, typer.Option("--batch")] = 16, share: float = 0.4) -> None:
    """Run both children, and print how they end."""
    plain = memgraph.plan(GPT(Shape(layers)), *batch(text(), 0, size), budget="20GB").peak
    there = sum(p.nbytes for p in GPT(Shape(layers)).parameters())
    budget = there + int(share * (plain - there))
    print(
        f"the step needs {plain / 1e6:.0f} MB as it is; budget {budget / 1e6:.0f} MB, slack {SLACK_NBYTES / 1e6:.0f} MB"
    )
    ended = {name: run_child(name, layers, size, budget) for name in ("eager", "memgraph")}
    for name, (code, last) in ended.items():
        print(f"{name:9} exit {code}: {last[:140]}")
    raise typer.Exit(0 if ended["eager"][0] != 0 and ended["memgraph"][0] == 0 else 1)


def run_child(name: str, layers: int, size: int, budget: int) -> tuple[int, str]:
    """Run a child; return how it ended, and its last line."""
    code = f"from benchmarks.limit import child; child({name!r}, {layers}, {size}, {budget})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    return ended.returncode, lines[-1] if lines else ""


def child(name: str, layers: int, size: int, budget: int) -> None:
    """Run one training step under the limit."""
    torch.manual_seed(0)
    model, given = GPT(Shape(layers)), batch(text(), 0, size)
    torch.ones(512, 512) @ torch.ones(512, 512)  # allocates the stacks of the thread pool before the limit is set
    return_freed_memory()
    there = sum(p.nbytes for p in model.parameters())
    limit = data_nbytes() + (budget - there) + SLACK_NBYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    run = memgraph.compile(model, budget) if name == "memgraph" else model
    torch.manual_seed(0)
    loss = run(*given)
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    print(f"loss {loss.item():.9f}, gradient norm {norm:.9f}, limit {limit / 1e6:.0f} MB")


def data_nbytes() -> int:
    """Return the private memory that counts against RLIMIT_DATA."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    typer.run(main)
