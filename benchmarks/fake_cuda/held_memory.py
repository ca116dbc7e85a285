"""Compare what torch's allocator holds for planned steps, in their arenas and outside, on a described device.

    python -m benchmarks.fake_cuda.held_memory [NAME ...]

    step             budget MB  allocated MB  held outside  held inside
    llama-8b at 25%     3710.1        3705.8       +22.1 %      +0.06 %

Steps have the sizes of real ones and run op by op. Requests and addresses are those of torch's own allocator, in a
process for each step; large results have no values, and kernels take no memory but cuBLAS's workspaces. So neither
times nor plans are those of a GPU.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

import memgraph
from benchmarks.blocks import SHAPES, stack
from benchmarks.clock import step_of
from benchmarks.contenders import settle
from benchmarks.fake_cuda.described_device import NoDescribedDeviceError, environment
from benchmarks.laps import Laps
from benchmarks.whole import SEVEN, made
from benchmarks.wide import WideAdamW
from memgraph.runtime.arena import StepArena

CUDA = torch.device("cuda", 0)
LAPS = Laps(CUDA)
DEVICE, SEARCH = "h200", 5.0  # the profile; seconds for a plan
STATE_BUDGET = 2 * 10**9  # bytes, of 8.9 GB of weights and states
Made = tuple[memgraph.CompiledModule, Callable[[], object]]


def activations(name: str, budget: int) -> Made:
    """Return a stack under a budget."""
    model, x = stack(SHAPES[name], CUDA)
    ours = memgraph.compile(model, budget, time_limit=SEARCH)
    return ours, step_of(model, lambda: ours(x))


def state() -> Made:
    """Return two of the 32 blocks of the 7B model, whose state is in pinned memory and is updated in backward."""
    model, batch = made(replace(SEVEN, shape=replace(SEVEN.shape, blocks=2, batch=1)), CUDA)
    optimizer = WideAdamW(model.parameters())
    ours = memgraph.compile(model, STATE_BUDGET, optimizer=optimizer, fuse_update=True, host=0.8, time_limit=SEARCH)

    def step() -> None:
        ours(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return ours, step


STEPS: dict[str, Callable[[], Made]] = {
    "gpt2-xl at 50%": partial(activations, "gpt2-xl", 2_628_000_000),  # of its activations
    "gpt2-xl at 25%": partial(activations, "gpt2-xl", 1_819_000_000),
    "llama-8b at 50%": partial(activations, "llama-8b", 5_985_000_000),
    "llama-8b at 25%": partial(activations, "llama-8b", 4_775_000_000),
    "7b, two blocks": state,
}


def row(name: str) -> str:
    """Measure a step in this process."""
    ours, step = STEPS[name]()
    settle(ours, step)
    inside = LAPS.bytes(step, ()) if ours.plan.arena.startswith("in ") else None
    why = ours.plan.arena or "not in an arena: the budget has room for what is held"
    with mock.patch.object(StepArena, "begin", lambda arena: None):
        step()
        gc.collect()
        allocated, held = LAPS.bytes(step, ())
    cells = f"{ours.plan.budget / 1e6:10.1f}{allocated / 1e6:14.1f}{_over(allocated, held):>14}"
    return f"{name:18}{cells}{_over(*inside) if inside else why:>14}"


def _over(allocated: int, held: int) -> str:
    return f"{100 * (held / allocated - 1):+.2f} %"


def main(*names: str) -> int:
    """Print a row for each step, or for those of these names; return the exit status."""
    try:
        described = environment(DEVICE)
    except NoDescribedDeviceError as error:
        print(error)
        return 1
    print(f"{'step':18}{'budget MB':>10}{'allocated MB':>14}{'held outside':>14}{'held inside':>14}", flush=True)
    module = "benchmarks.fake_cuda.host_kernels", "--shapes", "benchmarks.fake_cuda.held_memory", "--row"
    codes = [
        subprocess.run([sys.executable, "-m", *module, name], env=described, check=False).returncode
        for name in names or STEPS
    ]
    return int(any(codes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--row"]:
        print(row(sys.argv[2]), flush=True)
        os._exit(0)  # the memory of a described device need not be freed
    sys.exit(main(*sys.argv[1:]))
