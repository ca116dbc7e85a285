"""A process with a hard memory limit, in which a model with parameters of four times the budget trains and evaluates."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.limit import data_nbytes
from memgraph.system.device import trim_freed_memory
from tests.support.streamed_state import loss, streamed, streams

LAYERS, WIDTH, BUDGET = 28, 1024, 30_000_000
SLACK = 16 << 20  # what is no tensor, and more of it than a small model of as many layers has
STACK = 1 << 20  # glibc keeps the stacks of threads that planning had, those of a solver too, and the limit counts them
ENVIRONMENT = os.environ | {  # the limit counts tensors, not glibc's freed blocks
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts private memory on Linux only")
def test_parameters_of_four_times_the_budget_under_a_hard_limit() -> None:
    plain, offloaded = (run_child(name) for name in ("plain", "streamed"))
    assert plain.returncode != 0
    assert "can't allocate memory" in plain.stderr
    assert offloaded.returncode == 0, offloaded.stderr
    parameters, most, allowed = map(int, offloaded.stdout.split())
    assert parameters >= 3.9 * BUDGET
    assert most <= allowed


def run_child(name: str) -> subprocess.CompletedProcess[str]:
    code = f"from tests.memgraph.optim.test_offloaded_update_process import child; child({name!r})"
    command = ["bash", "-c", f'ulimit -S -s {STACK >> 10}; exec "$@"', "bash", sys.executable, "-c", code]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)


def child(name: str) -> None:
    """Three steps and an evaluation under the limit, after those that plan and bring everything home."""
    Run(name, WIDTH // 2, 12_000_000).step()  # code, threads, plans and the disk's speed are there from now on
    trim_freed_memory()
    base, limit = anonymous(), data_nbytes() + BUDGET + SLACK
    run = Run(name, WIDTH, BUDGET)
    if name == "streamed":
        for _ in range(3):  # at the third call the step may be planned again
            run.step()
        run.evaluate()
        trim_freed_memory()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    most = 0
    for _ in range(3):
        run.step()
        most = max(most, anonymous())
    run.evaluate()
    print(sum(p.nbytes for p in run.module.parameters()), max(most, anonymous()), base + BUDGET + SLACK)


class Run:
    """A model in training."""

    def __init__(self, name: str, width: int, budget: int) -> None:
        torch.manual_seed(0)
        self.x, self.name = torch.randn(16, width), name
        layers = (part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU()))
        self.module = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-2, momentum=0.9)
        self.model = streamed(self.module, budget, optimizer=self.optimizer) if name == "streamed" else None

    def loss(self) -> Tensor:
        result: Tensor = loss(self.module(self.x)) if self.model is None else self.model(self.x)
        return result

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        assert self.model is None or streams(self.model)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.loss()


def anonymous() -> int:
    """The memory of this process that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
